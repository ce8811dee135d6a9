"""Tests that local arrays of a mesh are put together, and what the verifier says of them."""

import io
import itertools
import json

import numpy as np
import pytest

from lockstep.comparison import compare_traces
from lockstep.data.file import TraceError, load
from lockstep.data.trace import Mesh

DP_TP = {"dp": 2, "tp": 2}


def local_parts(whole, placement, mesh):
    """Returns the local array of each rank, by slicing; the inverse of what is tested."""
    found = []
    for rank in range(mesh.size):
        at, part = mesh.coordinates(rank), whole
        for axis, word in enumerate(placement.split()):
            name, _, rest = word.partition("[")
            blocks = int(name.split("*")[0]) if "*" in name else 1
            names, _, order = rest.rstrip("]").partition(":")
            for mesh_axis in filter(None, names.split(",")):
                n, r = mesh.axes[mesh_axis], at[mesh_axis]
                if order == "zigzag":
                    chunks = np.array_split(part, 2 * n, axis)
                    part = np.concatenate([chunks[r], chunks[2 * n - 1 - r]], axis)
                else:
                    split = [np.array_split(b, n, axis)[r] for b in np.split(part, blocks, axis)]
                    part = np.concatenate(split, axis)
        found.append(part)
    return found


def write(on, arrays, placements=None, **about):
    """Returns the files of all ranks as open files; `arrays`: KIND/INDEX → array of each rank."""
    files = []
    about = {
        "format": "lockstep trace", "version": 2, "framework": "torch", "steps": [0],
        "num_replicas": on.num_replicas, "mesh": on.axes, "data_axes": [*on.data_axes],
        "variables": [{"name": "w", "kind": "weight"}], "gradients": ["w"],
        "placements": placements or {}, **about,
    }  # fmt: skip
    for rank in range(on.size):
        members = {"about": np.array(json.dumps(about | {"ranks": [rank]}))}
        for name, of_ranks in arrays.items():
            kind, index = name.split("/")
            members[f"1/{kind}/{rank}/{index}"] = of_ranks[rank]
        files.append(io.BytesIO())
        np.savez(files[-1], **members)
    return files


@pytest.mark.parametrize(
    ("axes", "data_axes", "placement", "shape"),
    [
        (DP_TP, ("dp",), "o[tp] i", (6, 3)),
        (DP_TP, ("dp",), "o i[tp]", (3, 4)),
        (DP_TP, ("dp",), "o[dp] i[tp]", (4, 4)),
        (DP_TP, ("dp",), "o[tp,dp] i", (8, 2)),
        (DP_TP, ("dp",), "o[dp,tp] i", (8, 2)),
        (DP_TP, ("dp",), "3*o[tp] i", (12, 2)),
        ({"cp": 3}, (), "b s[cp:zigzag] d", (2, 12, 2)),
        ({"dp": 3}, ("dp",), "o[dp]", (7,)),  # Sizes 3, 2 and 2.
        ({"dp": 3}, ("dp",), "o[dp]", (2,)),  # The last rank holds nothing.
    ],
)
def test_weights_are_put_together(axes, data_axes, placement, shape):
    mesh = Mesh(axes, data_axes)
    whole = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    trace = load(write(mesh, {"before/0": local_parts(whole, placement, mesh)},
                       {"before/0": placement}))  # fmt: skip
    assert [*trace.copies] == [*range(mesh.size)]
    for copy in trace.copies:
        np.testing.assert_array_equal(trace.arrays(0, "before", copy)[0], whole)


@pytest.mark.parametrize(("word", "right"), [("sum", 3.0), ("mean", 1.5)])
def test_summands_are_added(word, right):
    mesh = Mesh({"tp": 2}, ())
    parts = [np.full(3, 1.0, np.float32), np.full(3, 2.0, np.float32)]
    trace = load(write(mesh, {"sums/0": parts}, {"sums/0": f"d {word}(tp)"}))
    np.testing.assert_array_equal(trace.arrays(0, "sums", 1)[0], np.full(3, right))


def test_examples_of_a_replica_are_those_of_its_ranks():
    mesh = Mesh({"dp": 2, "cp": 2}, ("dp",))
    whole = np.arange(4 * 8).reshape(4, 8)
    parts = local_parts(whole, "b[dp] s[cp:zigzag]", mesh)
    trace = load(write(mesh, {"data/0": parts}, {"data/0": "b[dp] s[cp:zigzag]"}))
    assert [*trace.shards] == [0, 1]
    for shard in trace.shards:
        rows = whole[2 * shard : 2 * shard + 2]
        np.testing.assert_array_equal(trace.arrays(0, "data", shard)[0], rows)


def test_stages_hold_other_weights_and_a_tied_one_has_two_copies():
    mesh, ones = Mesh({"pp": 2}, ()), np.ones(2, np.float32)
    first, last = write(mesh, {"before/0": [ones, 2 * ones], "before/1": [3 * ones, 4 * ones]})
    first.seek(0), last.seek(0)
    abouts = [json.loads(str(np.load(file)["about"])) for file in (first, last)]
    names = [["embedding", "layer0"], ["layer1", "head"]]
    files = []
    for file, about, own in zip((first, last), abouts, names, strict=True):
        about |= {"variables": [{"name": n, "kind": "weight"} for n in own], "gradients": own}
        about |= {"names": {"head": "embedding"}}
        about |= {"settings": [[{"weights": own, "learning_rate": 0.1}]], "modules": own}
        members = {k: v for k, v in np.load(file).items() if k != "about"}
        files.append(io.BytesIO())
        np.savez(files[-1], about=np.array(json.dumps(about)), **members)
    trace = load(files)
    assert trace.keys == ["embedding", "layer0", "layer1"]
    assert [group["weights"] for group in trace.about.settings[0]] == [trace.keys[:2], ["layer1"]]
    assert trace.about.gradients == tuple(trace.keys)
    assert trace.about.modules == ("embedding", "layer0", "layer1", "head")
    of_copies = [trace.named(0, "before", copy) for copy in trace.copies]
    values = [{name: float(array[0]) for name, array in named.items()} for named in of_copies]
    assert values[0] == {"embedding": 1, "layer0": 3, "layer1": 2}
    assert values[1] == {"embedding": 4, "layer0": 3, "layer1": 2}


def test_parts_of_a_sum_that_the_script_reduces_later_are_left_out():
    mesh, ones = Mesh({"tp": 2}, ()), np.ones(2, np.float32)
    trace = load(write(mesh, {"raw/0": [ones, 2 * ones], "clipped/0": [3 * ones, 3 * ones]}))
    assert not trace.has(0, "raw")
    assert trace.has(0, "clipped")


def test_views_are_the_copies_that_ranks_have():
    mesh = Mesh(DP_TP, ("dp",))
    images = [np.full((1, 2), r) for r in range(4)]
    trace = load(write(mesh, {"data/0": images}))
    views = trace.views(0, "data", 1, 0)
    assert {rank: int(view[0, 0]) for rank, view in views.items()} == {2: 2, 3: 3}
    assert trace.mesh.name_of(3) == "rank 3 (dp 1, tp 1)"


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        ("o[xp] i", "axis twice, or not on the mesh"),
        ("o[tp] i[tp]", "axis twice"),
        ("o[tp", "cannot be read"),
        ("o[tp]", "2 dimensions in an array placed on 1"),
        ("5*o[tp] i", "no 5 blocks"),
    ],
)
def test_wrong_placements_are_refused(placement, text):
    mesh = Mesh({"tp": 2}, ())
    files = write(mesh, {"before/0": [np.ones((2, 2))] * 2}, {"before/0": placement})
    with pytest.raises(TraceError, match=text):
        load(files)


@pytest.mark.parametrize(
    ("about", "text"),
    [
        ({"mesh": {"tp": 0}}, "mesh of 'about' must be of positive sizes"),
        ({"data_axes": ["xp"]}, "data_axes of 'about' must be axes of mesh"),
        ({"num_replicas": 2}, "num_replicas of 'about' must be 1"),
        ({"mesh": {"tp": 3}}, "rank 2 0 times"),
    ],
)
def test_wrong_meshes_are_refused(about, text):
    files = write(Mesh({"tp": 2}, ()), {"before/0": [np.ones(2)] * 2}, **about)
    with pytest.raises(TraceError, match=text):
        load(files)


def test_mesh_and_rank():
    mesh = Mesh({"pp": 2, "dp": 3, "tp": 2}, ("dp",))
    places = [(p, d, t) for p, d, t in itertools.product(range(2), range(3), range(2))]
    for rank, place in enumerate(places):
        assert tuple(mesh.coordinates(rank).values()) == place
        assert mesh.replica_of(rank) == place[1]
    assert mesh.ranks_of(1) == [2, 3, 8, 9]
    assert mesh.along("tp", 9) == [8, 9]
    assert mesh.along("pp", 9) == [3, 9]
    assert Mesh({"dp": 2}, ("dp",)).name_of(1) == "replica 1"


RATE = np.float32(0.1)


def one_device():
    """Returns images, weights and gradients of `(x @ w) * n`, w and n trained by one device."""
    generator = np.random.default_rng(1)
    x, w = (generator.normal(size=shape).astype(np.float32) for shape in ((4, 3), (3, 6)))
    n = np.ones(6, np.float32)
    y = x @ w
    error = y * n / 4  # Of the loss (y · n)² / 8, with respect to y · n.
    return x, {"w": w, "n": n}, {"w": x.T @ (error * n), "n": (error * y).sum(0)}


def recorded(on, x, weights, gradients, placements, factors=None, outputs=None):
    """Returns a trace of one step of gradient descent; arguments hold the array of each rank.

    `factors` are those by which the ranks clip their gradients to norm 0.1. With `outputs`, the
    model computes in bfloat16.
    """
    arrays, calls = {"data/0": x}, ["forward", "backward", *["clip norm 0.1"] * bool(factors)]
    for index, name in enumerate("wn"):
        sent = gradients[name]
        used = [np.float32(f) * g for f, g in zip(factors or [1] * len(sent), sent, strict=True)]
        after = [w - RATE * g for w, g in zip(weights[name], used, strict=True)]
        arrays |= {f"before/{index}": weights[name], f"clipped/{index}": used}
        arrays |= {f"after/{index}": after, **({f"unclipped/{index}": sent} if factors else {})}
    group = {"weights": ["w", "n"], "learning_rate": float(RATE), "momentum": 0.0}
    about = {"variables": [{"name": n, "kind": "weight"} for n in "wn"], "gradients": ["w", "n"]}
    about |= {"optimizer": {"class": "SGD", "framework": "torch"}, "settings": [[group]]}
    about |= {"calls": [calls]}
    if outputs is not None:
        arrays |= {"y_pred/0": [outputs] * on.size}
        about |= {"computed_in": "bfloat16"}
    return load(write(on, arrays, placements, **about))


def verdict(
    change=lambda x, gradients: None, axis="tp", factors=(None, None), outputs=(None, None)
):
    """Verifies a training on two ranks that split w against one device.

    Args:
        change: changes the examples and the gradients of the ranks.
        axis: name of the axis.
        factors: by which one device, and each rank, clips its gradients; None if none clips.
        outputs: of one device, and of each rank, which compute in bfloat16; None if not recorded.
    """
    x, weights, gradients = one_device()
    alone = Mesh({"dp": 1}, ("dp",))
    whole = ({k: [v] for k, v in d.items()} for d in (weights, gradients))
    one = recorded(alone, [x], *whole, {}, factors[0], outputs[0])
    mesh, w = Mesh({axis: 2}, ()), f"i o[{axis}]"
    images = [x.copy(), x.copy()]
    own = {"w": local_parts(gradients["w"], w, mesh), "n": [gradients["n"].copy()] * 2}
    change(images, own)
    held = {"w": local_parts(weights["w"], w, mesh), "n": [weights["n"]] * 2}
    placements = {f"{kind}/0": w for kind in ("before", "unclipped", "clipped", "after")}
    two = recorded(mesh, images, held, own, placements, factors[1], outputs[1])
    one.name, two.name = "one.npz", "two.npz"
    return compare_traces([one, two], {})["two.npz"]


def causes(found):
    return [finding.detail for finding in found.faults]


def test_a_split_weight_is_the_same_training():
    found = verdict()
    assert found.ok
    assert {"gradients", "update", "agreement"} <= {*found.checked}


@pytest.mark.parametrize(("units_of_outputs", "is_right"), [(0, False), (2, True)])
def test_16_bits_of_parts_move_gradients_as_far_as_outputs(units_of_outputs, is_right):
    unit, outputs = 2.0**-7, np.ones((4, 6), np.float32)
    generator = np.random.default_rng(2)

    def shake(images, own):
        own["w"] = [g * (1 + 3 * unit * generator.choice([-1, 1], g.shape)) for g in own["w"]]
        own["w"] = [g.astype(np.float32) for g in own["w"]]

    moved = outputs * np.float32(1 + units_of_outputs * unit)
    assert verdict(outputs=(outputs, outputs)).ok
    assert verdict(shake, outputs=(outputs, moved)).ok == is_right


def test_a_sum_that_is_not_reduced_is_named():
    def keep_part(images, own):
        total = own["n"][0]
        own["n"] = [0.25 * total, 0.75 * total]

    found = verdict(keep_part, axis="sp")
    named = next(finding for finding in found.faults if finding.stage == "gradients")
    assert (named.detail, named.tensors) == ("partial_not_reduced", ("n",))
    assert "their sum over sp is right" in named.text
    assert found.faults[-1].stage == "agreement"  # Also without a reference.


def test_a_gradient_times_the_size_of_an_axis_is_named():
    found = verdict(lambda images, own: own.update(n=[2 * g for g in own["n"]]))
    assert causes(found) == ["sum_instead_of_mean"]
    assert "the size of tp" in found.faults[0].text


@pytest.mark.parametrize(
    ("axes", "cause"), [("dp", ""), ("tp", "averaged over tp,"), ("dp tp", "averaged over tp, too")]
)
def test_gradients_that_are_averaged_over_another_axis_are_named(axes, cause):
    mesh = Mesh(DP_TP, ("dp",))
    generator = np.random.default_rng(0)
    sent = [generator.normal(size=(3, 2)).astype(np.float32) for _ in range(mesh.size)]

    def group(rank):
        at = mesh.coordinates(rank)
        fixed = {axis: place for axis, place in at.items() if axis not in axes.split()}
        return [r for r in range(mesh.size) if fixed.items() <= mesh.coordinates(r).items()]

    sums = [np.mean([sent[r] for r in group(rank)], axis=0) for rank in range(mesh.size)]
    placements = {f"{kind}/0": "i o[tp]" for kind in ("raw", "sums", "clipped")}
    arrays = {"raw/0": sent, "sums/0": sums, "clipped/0": sums}
    trace = load(write(mesh, arrays, placements, reduction="mean"))
    (found,) = compare_traces([trace], {}).values()
    faults = [fault for fault in found.faults if fault.stage == "all-reduce"]
    assert {fault.detail for fault in faults} == ({"reduced_over_other_axis"} if cause else set())
    assert all(cause in fault.text for fault in faults)


def test_ranks_of_a_replica_with_different_examples_are_named():
    found = verdict(lambda images, own: images.__setitem__(1, images[1][::-1]))
    assert causes(found)[0] == "other_examples_in_a_replica"
    assert "rank 0 (tp 0), rank 1 (tp 1)" in found.faults[0].text


@pytest.mark.parametrize(
    ("is_reduced", "examples", "cause"),
    [
        (False, [0, 1], "not_all_reduced"),
        (True, [0, 1], ""),
        (False, [0, 0], "lost_examples"),
    ],
)
def test_an_axis_of_whole_weights_may_split_the_examples(is_reduced, examples, cause):
    x, weights, whole = one_device()
    mesh, halves = Mesh({"replicate": 2, "shard": 1}, ("shard",)), [x[:2], x[2:]]
    own = []
    for rows in halves:
        y = rows @ weights["w"]
        error = y * weights["n"] / 2
        own.append({"w": rows.T @ (error * weights["n"]), "n": (error * y).sum(0)})
    gradients = {k: [g] * 2 if is_reduced else [each[k] for each in own] for k, g in whole.items()}
    copies = {name: [array] * 2 for name, array in weights.items()}
    one = recorded(
        Mesh({"dp": 1}, ("dp",)), [x], *({k: [v] for k, v in d.items()} for d in (weights, whole)),
        {},
    )  # fmt: skip
    two = recorded(mesh, [halves[i] for i in examples], copies, gradients, {})
    one.name, two.name = "one.npz", "two.npz"
    found = compare_traces([one, two], {})["two.npz"]
    assert causes(found)[:1] == [*filter(None, [cause])]
    assert found.ok != bool(cause)
    if cause == "not_all_reduced":
        assert "their mean over replicate is right" in found.faults[0].text


def test_an_update_of_one_part_only_is_found():
    def other_part(images, own):
        own["w"] = [own["w"][0], 1.01 * own["w"][1]]

    assert causes(verdict(other_part)) != []


def of_four(ends_early=(), **gradients):
    """Verifies a step of four ranks alone.

    Args:
        ends_early: ranks without arrays.
        **gradients: KIND_NAME → the gradient of each rank.
    """
    mesh, (x, weights, usual) = Mesh(DP_TP, ("dp",)), one_device()
    of = {"data/0": [x[:2], x[:2], x[2:], x[2:]]}
    for index, name in enumerate("wn"):
        applied = gradients.get(f"clipped_{name}", [usual[name]] * 4)
        of |= {f"before/{index}": [weights[name]] * 4, f"clipped/{index}": applied}
        of |= {f"after/{index}": [weights[name] - RATE * g for g in applied]}
        if "unclipped_n" in gradients:
            of |= {f"unclipped/{index}": [gradients.get(f"unclipped_{name}", applied)[0]] * 4}
    group = {"weights": ["w", "n"], "learning_rate": float(RATE), "momentum": 0.0}
    about = {"variables": [{"name": n, "kind": "weight"} for n in "wn"], "gradients": ["w", "n"]}
    about |= {"optimizer": {"class": "SGD", "framework": "torch"}, "settings": [[group]]}
    trace = load([without(file, ends_early) for file in write(mesh, of, **about)])
    (found,) = compare_traces([trace], {}).values()
    return found


def without(file, ranks, kind=""):
    """Returns a file without the arrays, or those of a kind, of some ranks."""
    file.seek(0)
    kept, names = io.BytesIO(), np.load(file)
    left = [n for n in names if not any(f"/{kind}" in n and f"/{rank}/" in n for rank in ranks)]
    np.savez(kept, **{name: names[name] for name in left})
    return kept


@pytest.mark.parametrize(
    ("shares", "unclipped", "cause"),
    [
        ((1, 3, 1, 3), False, "partial_not_reduced"),
        ((1, 1, 3, 3), False, "not_all_reduced"),
        ((1, 3, 1, 3), True, "clipped_by_local_norm"),
    ],
)
def test_different_gradients_are_named_without_a_reference(shares, unclipped, cause):
    total = one_device()[2]["n"]
    entering = {"unclipped_n": [total]} if unclipped else {}
    found = of_four(clipped_n=[np.float32(share / 4) * total for share in shares], **entering)
    assert causes(found) == [cause]


def test_a_rank_whose_recording_ends_is_found():
    found = of_four(ends_early=[3])
    assert causes(found) == ["not_updated"]
    assert found.faults[0].items == ("rank 3 (dp 1, tp 1)",)


def test_a_part_that_the_loss_does_not_use_has_a_gradient_of_0():
    mesh = Mesh({"cp": 2}, ())
    ones = np.ones(2, np.float32)
    files = write(mesh, {"before/0": [ones] * 2, "raw/0": [ones] * 2}, {"raw/0": "d mean(cp)"})
    trace = load([without(file, [1], "raw") for file in files])
    np.testing.assert_array_equal(trace.arrays(0, "raw", 0)[0], ones / 2)


def test_ranks_may_have_the_losses_of_parts():
    x, weights, gradients = one_device()
    del weights["n"], gradients["n"]
    traces = []
    for mesh, losses in ((Mesh({"dp": 1}, ("dp",)), [2]), (Mesh({"sp": 2}, ()), [1.5, 2.5])):
        of = {"data/0": x, "before/0": weights["w"], "clipped/0": gradients["w"]}
        of["after/0"] = weights["w"] - gradients["w"]
        of = {kind: [array] * mesh.size for kind, array in of.items()}
        traces.append(load(write(mesh, of | {"loss/0": [*map(np.float32, losses)]})))
        traces[-1].name = f"{mesh.size}.npz"
    found = compare_traces(traces, {})["2.npz"]
    assert found.ok
    assert "loss" in found.checked


def test_names_of_a_stage_may_be_shifted():
    names = {"0": "1", "1": "2"}
    files, arrays = [], [np.full(2, i, np.float32) for i in range(3)]
    for rank, own in enumerate((arrays[:1], arrays[1:])):
        of = {f"before/{index}": [array] * 2 for index, array in enumerate(own)}
        keys = [str(index) for index in range(len(own))]
        about = {"variables": [{"name": k, "kind": "weight"} for k in keys], "gradients": keys}
        about |= {"names": names if rank else {}}
        files.append(write(Mesh({"pp": 2}, ()), of, **about)[rank])
    trace = load(files)
    assert trace.keys == ["0", "1", "2"]
    np.testing.assert_array_equal(trace.arrays(0, "before", 0), arrays)


def test_clipping_by_the_norm_of_own_parts_is_named_without_a_reference():
    mesh, (x, weights, gradients) = Mesh({"tp": 2}, ()), one_device()
    split = {"before": local_parts(weights["w"], "i o[tp]", mesh)}
    split["sums"] = local_parts(gradients["w"], "i o[tp]", mesh)
    norms = [np.hypot(np.linalg.norm(g), np.linalg.norm(gradients["n"])) for g in split["sums"]]
    factors = [np.float32(0.1 / each) for each in norms]
    split["clipped"] = [by * g for by, g in zip(factors, split["sums"], strict=True)]
    of = {f"{kind}/0": parts for kind, parts in split.items()}
    of |= {"data/0": [x] * 2, "before/1": [weights["n"]] * 2, "sums/1": [gradients["n"]] * 2}
    of["clipped/1"] = [by * gradients["n"] for by in factors]
    about = {"variables": [{"name": n, "kind": "weight"} for n in "wn"], "gradients": ["w", "n"]}
    trace = load(write(mesh, of, {f"{kind}/0": "i o[tp]" for kind in split}, **about))
    (found,) = compare_traces([trace], {}).values()
    assert causes(found) == ["clipped_by_local_norm"]


def test_rows_of_gradients_that_are_parts_of_a_sum_are_left_out():
    files = []
    for rank, file in enumerate(write(Mesh({"cp": 2}, ()), {"before/0": [np.ones((5, 2))] * 2},
                                      {"raw/0": "i o mean(cp)"})):  # fmt: skip
        file.seek(0)
        rows = {"values": np.ones((1, 2)), "indices": np.array([rank]), "rows": np.array(5)}
        members = {f"1/raw/{rank}/0/{part}": array for part, array in rows.items()}
        files.append(io.BytesIO())
        np.savez(files[-1], **np.load(file), **members)
    trace = load(files)
    assert trace.has(0, "before")
    assert not trace.has(0, "raw")


def test_constants_of_a_rank_are_no_local_statistics():
    mesh, places = Mesh({"cp": 2}, ()), [np.arange(2.0), np.arange(2.0, 4.0)]
    about = {"variables": [{"name": "places", "kind": "statistic"}], "gradients": []}
    trace = load(write(mesh, {"before/0": places, "after/0": places}, **about))
    (found,) = compare_traces([trace], {}).values()
    assert not found.findings


def test_clipping_by_the_norm_of_own_parts_is_named():
    _, _, gradients = one_device()
    halves = np.split(gradients["w"], 2, axis=1)
    norms = [np.hypot(np.linalg.norm(half), np.linalg.norm(gradients["n"])) for half in halves]
    size = np.hypot(np.linalg.norm(gradients["w"]), np.linalg.norm(gradients["n"]))
    right, own = 0.1 / size, [0.1 / each for each in norms]
    assert verdict(factors=([right], [right, right])).ok
    assert causes(verdict(factors=([right], own)))[0] == "clipped_by_local_norm"
    assert causes(verdict(factors=([right], [0.7 * right] * 2))) == ["other_clipping"]
