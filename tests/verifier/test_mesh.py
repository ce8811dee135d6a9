"""Tests that local arrays of a mesh are put together, and what the verifier says of them."""

import io
import itertools
import json

import numpy as np
import pytest

from lockstep.data.file import TraceError, load
from lockstep.data.trace import Mesh
from lockstep.engine import verify

from . import shown
from .changes import NOISY, on_two_ranks
from .trainer import Script

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
            kind, index = name.split("/", 1)
            members[f"1/{kind}/{rank}/{index}"] = of_ranks[rank]
        files.append(io.BytesIO())
        np.savez(files[-1], **members)
    return files


@pytest.mark.parametrize(("axes", "data_axes", "placement", "shape"), [
    (DP_TP, ("dp",), "o i[tp]", (3, 4)),
    (DP_TP, ("dp",), "o[dp] i[tp]", (4, 4)),
    (DP_TP, ("dp",), "o[dp,tp] i", (8, 2)),
    (DP_TP, ("dp",), "3*o[tp] i", (12, 2)),
    ({"cp": 3}, (), "b s[cp:zigzag] d", (2, 12, 2)),
    ({"dp": 3}, ("dp",), "o[dp]", (7,)),  # Sizes 3, 2 and 2.
    ({"dp": 3}, ("dp",), "o[dp]", (2,)),  # The last rank holds nothing.
])  # fmt: skip
def test_weights_are_put_together(axes, data_axes, placement, shape):
    mesh = Mesh(axes, data_axes)
    whole = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    trace = load(write(mesh, {"before/0": local_parts(whole, placement, mesh)},
                       {"before/0": placement}))  # fmt: skip
    assert [*trace.copies] == [*range(mesh.size)]
    for copy in trace.copies:
        array = trace.arrays(0, "before", copy)[0]
        np.testing.assert_array_equal(array, whole)
        assert array is trace.arrays(0, "before", copy)[0]  # It is put together once.


def test_summands_are_added_and_examples_are_those_of_the_ranks_of_a_replica():
    ones, twos = np.full(3, 1.0, np.float32), np.full(3, 2.0, np.float32)
    for word, right in (("sum", 3.0), ("mean", 1.5)):
        placements = {"sums/0": f"d {word}(tp)"}
        trace = load(write(Mesh({"tp": 2}, ()), {"sums/0": [ones, twos]}, placements))
        np.testing.assert_array_equal(trace.arrays(0, "sums", 1)[0], np.full(3, right))
    mesh, whole = Mesh({"dp": 2, "cp": 2}, ("dp",)), np.arange(4 * 8).reshape(4, 8)
    placement = "b[dp] s[cp:zigzag]"
    parts = local_parts(whole, placement, mesh)
    trace = load(write(mesh, {"data/0": parts}, {"data/0": placement}))
    assert [*trace.shards] == [0, 1]
    for shard, rows in enumerate(np.split(whole, 2)):
        np.testing.assert_array_equal(trace.arrays(0, "data", shard)[0], rows)


def of_stages(values, names, renamed):
    """Returns a trace of stages that have other weights: values, names, and names in the whole."""
    files, mesh = [], Mesh({"pp": 2}, ())
    for rank, (own, of_rank) in enumerate(zip(values, names, strict=True)):
        arrays = {f"before/{i}": [np.full(2, x, np.float32)] * 2 for i, x in enumerate(own)}
        described = {
            "variables": [{"name": name, "kind": "weight"} for name in of_rank],
            "gradients": of_rank, "modules": of_rank,
            "settings": [[{"weights": of_rank, "learning_rate": 0.1}]],
        }  # fmt: skip
        files.append(write(mesh, arrays, **described, names=renamed[rank])[rank])
    return load(files)


def test_stages_hold_other_weights_and_a_tied_one_has_two_copies():
    names = [["embedding", "layer0"], ["layer1", "head"]]
    trace = of_stages([[1, 3], [2, 4]], names, [{"head": "embedding"}] * 2)
    assert trace.keys == ["embedding", "layer0", "layer1"]
    assert [group["weights"] for group in trace.about.settings[0]] == [trace.keys[:2], ["layer1"]]
    assert trace.about.gradients == tuple(trace.keys)
    assert trace.about.modules == ("embedding", "layer0", "layer1", "head")
    of_copies = [trace.named(0, "before", copy) for copy in trace.copies]
    values = [{name: float(array[0]) for name, array in named.items()} for named in of_copies]
    assert values[0] == {"embedding": 1, "layer0": 3, "layer1": 2}
    assert values[1] == {"embedding": 4, "layer0": 3, "layer1": 2}


def test_names_of_a_stage_may_be_shifted():
    shifted = {"0": "1", "1": "2"}
    trace = of_stages([[0], [1, 2]], [["0"], ["0", "1"]], [{}, shifted])
    assert trace.keys == ["0", "1", "2"]
    assert [float(array[0]) for array in trace.arrays(0, "before", 0)] == [0, 1, 2]


def test_parts_of_a_sum_that_cannot_be_added_are_left_out():
    """The script reduces them later; or they are rows of a gradient."""
    ones, mesh = np.ones(2, np.float32), Mesh({"cp": 2}, ())
    trace = load(write(mesh, {"raw/0": [ones, 2 * ones], "clipped/0": [3 * ones, 3 * ones]}))
    assert trace.has(0, "clipped") and not trace.has(0, "raw")
    rows = {"values": np.ones((1, 2)), "indices": np.array([0]), "rows": np.array(5)}
    arrays = {f"raw/0/{part}": [array] * 2 for part, array in rows.items()}
    arrays["before/0"] = [np.ones((5, 2))] * 2
    trace = load(write(mesh, arrays, {"raw/0": "i o mean(cp)"}))
    assert trace.has(0, "before") and not trace.has(0, "raw")
    # A part that the loss does not use has a gradient of 0.
    before, placements = {"before/0": [ones] * 2}, {"raw/0": "d mean(cp)"}
    first, _ = write(mesh, before | {"raw/0": [ones] * 2}, placements)
    trace = load([first, write(mesh, before, placements)[1]])
    np.testing.assert_array_equal(trace.arrays(0, "raw", 0)[0], ones / 2)


@pytest.mark.parametrize(("placement", "about", "text"), [
    ("o[xp] i[tp]", {}, "axis twice, or not on the mesh"),
    ("o[tp] i[tp]", {}, "axis twice"),
    ("o[tp", {}, "cannot be read"),
    ("o[tp]", {}, "2 dimensions in an array placed on 1"),
    ("5*o[tp] i", {}, "no 5 blocks"),
    ("o i", {"mesh": {"tp": 0}}, "mesh of 'about' must be of positive sizes"),
    ("o i", {"data_axes": ["xp"]}, "data_axes of 'about' must be axes of mesh"),
    ("o i", {"num_replicas": 2}, "num_replicas of 'about' must be 1"),
    ("o i", {"mesh": {"tp": 3}}, "rank 2 0 times"),
])  # fmt: skip
def test_wrong_placements_and_meshes_are_refused(placement, about, text):
    arrays = {"before/0": [np.ones((2, 2))] * 2}
    files = write(Mesh({"tp": 2}, ()), arrays, {"before/0": placement}, **about)
    with pytest.raises(TraceError, match=text):
        load(files)


def test_mesh_and_rank():
    mesh = Mesh({"pp": 2, "dp": 3, "tp": 2}, ("dp",))
    for rank, place in enumerate(itertools.product(range(2), range(3), range(2))):
        assert tuple(mesh.coordinates(rank).values()) == place
        assert mesh.replica_of(rank) == place[1]
    assert mesh.ranks_of(1) == [2, 3, 8, 9]
    assert mesh.along("tp", 9) == [8, 9]
    assert mesh.along("pp", 9) == [3, 9]
    assert Mesh({"dp": 2}, ("dp",)).name_of(1) == "replica 1"


# --- Verdicts on two ranks that compute one replica together --------------------------------------


def verdict_of(views, **change):
    """Returns the verdict on two ranks; kind of an array → what each of them has."""
    one = Script()
    kinds = {f"1/{kind}/0/0": of_ranks for kind, of_ranks in views.items()}
    two = Script(replay=one, **change)
    two.arrays |= {name: of_ranks[0] for name, of_ranks in kinds.items()}
    return verify(one.trace(), on_two_ranks(two.trace("two.npz"), kinds))


def test_ranks_of_a_replica_have_equal_examples():
    images = Script().arrays["1/data/0/0"]
    found = verdict_of({"data": [images, images[::-1]]}, **NOISY)
    assert shown(found) == "fault: examples: other_examples_in_a_replica"


@pytest.mark.parametrize(("own", "after", "is_right"), [
    ([(7, 0), (8, 0)], [(5, 1), (5, 1)], False),
    ([(7, 0), (7, 0)], [(5, 1), (5, 1)], True),
    ([(7, 0), (8, 0)], [(5, 0), (5, 0)], True),  # Nothing is drawn.
    ([(7, 0), (8, 0)], [(9, 1), (9, 1)], True),  # The model sets the seed.
])  # fmt: skip
def test_random_states_of_ranks_that_replay_replaced(own, after, is_right):
    """Seed and place of each rank: its own, that which `replay` loaded, and that after the step."""
    kinds = {"own_random": own, "random": [(5, 0), (5, 0)], "random_after": after}
    found = verdict_of({
        kind: [np.repeat(np.uint8(state), 8) for state in of_ranks]
        for kind, of_ranks in kinds.items()
    })  # fmt: skip
    assert shown(found) == ("clean" if is_right else "fault: random: other_random_numbers")
