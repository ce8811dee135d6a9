"""Trainings with PyTorch, and checks of what was recorded of them.

`python torch_cases.py FOLDER KIND` trains in FOLDER: `one` and `more` in one process, `two` and
`sharded` in two; `four` has the cases of `torch_mesh_cases.py`.
"""

import contextlib
import importlib
import json
import os
import pathlib
import shutil
import sys
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel

from lockstep import compare, record_torch
from lockstep.data import file as trace_file
from recording import Trace, run_cases

torch.set_num_threads(1)
KERAS_VARIABLES = {
    "conv/kernel": ("weight", "HWIO", (2, 2, 1, 4)), "conv/bias": ("weight", "", (4,)),
    "bn/gamma": ("weight", "", (4,)), "bn/beta": ("weight", "", (4,)),
    "dense/kernel": ("weight", "IO", (64, 5)), "dense/bias": ("weight", "", (5,)),
    "bn/moving_mean": ("statistic", "", (4,)), "bn/moving_variance": ("statistic", "", (4,)),
}  # fmt: skip


def network(dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 2, stride=2), nn.BatchNorm2d(4), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(64, 5))


def batch(step, shard=0, num_shards=1):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(12, 1, 8, 8, generator=generator)
    y = torch.randn(12, 5, generator=generator)
    return x[shard::num_shards], y[shard::num_shards]


def train(model, optimizer, path=None, num_steps=4, shards=(0, 1), by_shard=None, **options):
    """Trains, with a recording if there is a path, and returns the final bits."""
    options |= {"shards": by_shard} if by_shard else {}
    with record_torch.record(path or None, model, optimizer, **options):
        for step in range(num_steps):
            x, y = batch(step, *shards)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return [x.clone() for x in model.state_dict().values()]


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), 0.01, **options)


def trained(path, model=None, optimizer=adamw, **options):
    """Trains a network with a recording; returns the recording."""
    model = network() if model is None else model
    train(model, optimizer(model), f"{path}.npz", **options)
    return Trace(path)


def momentum(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def is_equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_equal(a, b):
    assert a.keys() == b.keys() and a
    for key in a:
        np.testing.assert_array_equal(a[key], b[key], err_msg=key)


def assert_close(a, b, tolerance=1e-5):
    """Without the bias before BatchNorm, whose gradient is rounding only."""
    assert a.keys() == b.keys() and a
    for key in a.keys() - {"0.bias"}:
        assert np.abs(a[key] - b[key]).max() < tolerance * max(np.abs(b[key]).max(), 1e-3), key


def norm_of(arrays):
    return sum(np.square(x, dtype=float).sum() for x in arrays.values()) ** 0.5


def mean_of_raw(trace, step):
    raw = [trace.kind("raw", step, replica) for replica in range(2)]
    return {name: (raw[0][name] + raw[1][name]) / 2 for name in raw[0]}


# --- One process -----------------------------------------------------------------------------


def case_format():
    model = network(dropout=0.3)
    groups = [
        {"params": [*model[0].parameters()]},
        {"params": [*model[1:].parameters()], "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, 0.01, betas=(0.8, 0.99), weight_decay=0.1)
    original = torch.autograd.backward
    with record_torch.record("format.npz", model, optimizer, steps=[0, 2]):
        for step in range(4):
            x, y = batch(step)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] /= 2
            model.eval()
            model(x)
            model.train()
            with torch.no_grad():
                model(x)
    hooks = [model._forward_pre_hooks, model._forward_hooks]
    hooks += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    assert not any(hooks) and torch.autograd.backward is original
    trace = Trace("format")
    check_about(trace.about)
    kinds = {key.split("/")[1] for key in trace.arrays}
    expected = {"data", "random", "random_after", "loss", "raw", "clipped", "before", "after"}
    assert kinds == {*expected, "y_pred", "y_grad"}
    assert {key.split("/")[0] for key in trace.arrays} == {"1", "2"}
    check_arrays(trace)


def check_about(about):
    assert (about["format"], about["version"], about["framework"]) == ("lockstep trace", 2, "torch")
    assert (about["num_replicas"], about["replicas"], about["steps"]) == (1, [0], [0, 2])
    assert (about["reduction"], about["order"], about["wrapper"]) == ("", "reduce, clip", "")
    assert (about["data_layout"], about["permuted"], about["replayed"]) == ("NCHW", None, None)
    assert about["micro_batches"] == [1, 1]
    weights = ["0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"]
    assert about["gradients"] == weights
    described = {v["name"]: v for v in about["variables"]}
    assert described["0.weight"] == {"name": "0.weight", "kind": "weight", "layout": "OIHW"}
    assert described["4.weight"]["layout"] == "OI" and described["4.bias"]["layout"] == ""
    assert described["1.num_batches_tracked"]["kind"] == "statistic"
    assert described["4.bias/exp_avg"] == {
        **{"name": "4.bias/exp_avg", "kind": "optimizer state", "layout": ""},
        **{"of": "4.bias", "slot": "exp_avg"},
    }
    convolution, norm, dropout, dense = about["layers"]
    assert convolution["class"] == "Conv2d" and convolution["weights"] == ["0.weight", "0.bias"]
    assert (convolution["strides"], convolution["padding"]) == ([2, 2], [0, 0])
    assert (norm["class"], norm["epsilon"], norm["momentum"]) == ("BatchNorm2d", 1e-5, 0.1)
    assert "1.running_var" in norm["weights"]
    assert (dropout["class"], dropout["rate"]) == ("Dropout", 0.3)
    assert dense == {"name": "4", "class": "Linear", "weights": ["4.weight", "4.bias"]}
    assert about["optimizer"]["class"] == "AdamW" and about["optimizer"]["framework"] == "torch"
    first, last = about["settings"]
    assert [group["learning_rate"] for group in first] == [0.01, 0.5]
    assert [group["learning_rate"] for group in last] == [0.0025, 0.125]
    assert first[0]["weights"] == ["0.weight", "0.bias"]
    expected = {"beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-8, "weight_decay": 0.1}
    assert expected.items() <= first[1].items() and first[1]["amsgrad"] is False


def check_arrays(trace):
    assert trace.kind("data")["0"].shape == (12, 1, 8, 8)
    assert trace.kind("random")["0"].dtype == np.uint8
    assert not np.array_equal(trace.kind("random")["0"], trace.kind("random_after")["0"])
    assert trace.kind("loss")["0"].shape == () and trace.kind("loss")["0"] > 0
    assert_equal(trace.kind("raw"), trace.kind("clipped"))  # Nothing is clipped in this training.
    y_pred, y_grad = trace.kind("y_pred")["0"], trace.kind("y_grad")["0"]
    assert y_pred.shape == y_grad.shape and len(y_pred) == 12
    y = batch(0)[1].numpy()
    np.testing.assert_allclose(y_grad, 2 * (y_pred - y) / y.size, rtol=1e-4, atol=1e-6)
    before, after = trace.kind("before"), trace.kind("after")
    assert "0.weight/step" not in before and after["0.weight/step"] == 1
    assert trace.kind("before", 2)["0.weight/step"] == 2
    assert (before["1.num_batches_tracked"], after["1.num_batches_tracked"]) == (0, 1)
    gradient = trace.kind("clipped")["4.bias"]
    np.testing.assert_allclose(after["4.bias/exp_avg"], 0.2 * gradient, rtol=1e-6)
    expected = before["4.bias"] * (1 - 0.5 * 0.1) - 0.5 * np.sign(gradient)
    np.testing.assert_allclose(after["4.bias"], expected, rtol=1e-4)


def case_bits():
    for options in ({"steps": 3}, {"steps": [1]}):
        bits = []
        for path in (None, "bits.npz"):
            model = network(0.3)
            bits.append(train(model, adamw(model), path, **options if path else {}))
        assert is_equal(*bits)


def case_replay():
    """The weights are those of the other recording, which may be of several processes."""
    steps = {"steps": [0, 1, 3]}
    first = trained("first", **steps)
    assert norm_of(first.kind("clipped")) <= 0.5 + 1e-6 < norm_of(first.kind("raw"))
    shutil.copy("first.npz", "ranks.rank0.npz")
    for path, replay in {
        "again": "first.npz",
        "of_rank": "ranks.npz",
        "permuted": "first.npz",
    }.items():
        model = network()
        nn.init.ones_(model[0].weight)
        permute = {"permute": 1} if path == "permuted" else {}
        again = trained(path, model, replay=replay, **permute, **steps)
        assert again.about["replayed"] == replay
        if not permute:
            assert_equal(first.arrays, again.arrays)
            assert again.replaced["1/replaced/0/0"].min() == 1  # What the script starts from.
            assert {*again.about["aliases"]} >= {n for n in again.replaced if n[:2] == "2/"}
    verdict = compare("first.npz", "again.npz")
    # The weights that replay= has replaced are another start; all else is the same.
    assert [(each.stage, each.steps) for each in verdict.findings] == [("start", (0,))]
    assert {"update", "gradients"} <= {*verdict.checked}
    assert again.about["permuted"] == 1
    for step in steps["steps"]:
        assert_equal(first.kind("before", step), again.kind("before", step))
        a, b = first.kind("data", step)["0"], again.kind("data", step)["0"]
        assert not np.array_equal(a, b)
        np.testing.assert_array_equal(np.sort(a.sum((1, 2, 3))), np.sort(b.sum((1, 2, 3))))
        assert_close(first.kind("raw", step), again.kind("raw", step))
        losses = [trace.kind("loss", step)["0"] for trace in (first, again)]
        np.testing.assert_allclose(*losses, rtol=1e-6)
    random = trained("random", network(0.3), steps=3)
    model = network(0.3)
    torch.manual_seed(1)
    assert_equal(random.arrays, trained("again", model, steps=3, replay="random.npz").arrays)


def of_two(name, dropout):
    """Records two trainings as the ranks of one."""
    for rank in range(2):
        model = network(dropout)
        torch.manual_seed(rank)
        train(model, momentum(model), "part.npz", shards=(rank, 2), steps=1)
        trace = Trace("part")
        arrays = {key.replace("/0/", f"/{rank}/"): x for key, x in trace.arrays.items()}
        about = trace.about | {"num_replicas": 2, "replicas": [rank], "reduction": "mean"}
        about["aliases"] = {}  # All arrays have their names.
        np.savez(f"{name}.rank{rank}.npz", about=np.array(json.dumps(about)), **arrays)
    return Trace(name)


def case_shards():
    """One process computes each replica's part of the batch, with its random numbers."""
    others = {"steps": 1, "replay": "shards.npz"}
    options = others | {"by_shard": "each"}
    for dropout in (0.0, 0.3):
        two, model = of_two("shards", dropout), network(dropout)
        one = trained("by_shard", model, momentum, **options)
        assert "forward" not in vars(model)
        np.testing.assert_array_equal(one.arrays["1/shards/0/0"], np.arange(12) % 2)
        assert_close(one.kind("raw"), mean_of_raw(two, 0))
        for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
            np.testing.assert_array_equal(one.kind("after")[name], two.kind("after")[name])
    permuted = trained("by_shard_permuted", None, momentum, permute=1, **options)
    assert sorted(permuted.arrays["1/shards/0/0"]) == [0] * 6 + [1] * 6
    model = network()
    compiled = torch.compile(model, backend="eager")
    assert "1/shards/0/0" in trained("compiled", compiled, momentum, **options).arrays
    told = warnings_of(trained, "half", None, momentum, shards=(0, 2), **options)
    assert "1/shards/0/0" not in Trace("half").arrays
    assert (
        "half.npz: step 0 has other examples than shards.npz; not computed for each shard" in told
    )
    whole = network()
    whole.forward = lambda x, inner=whole.forward: inner(x).sum()
    refused("shards='each': the model has an output of shape (), without a row", train, whole,
            momentum(whole), "output.npz", **options)  # fmt: skip


def case_modules_of_shards():
    """The outputs of a module are in the order of the batch, as those of the model."""
    of_two("shards", 0.0)
    options = {"steps": 1, "replay": "shards.npz", "by_shard": "each", "modules": True}
    one = trained("by_shard", None, momentum, **options).arrays
    np.testing.assert_array_equal(one["1/module_out/0/4"], one["1/y_pred/0/0"])


class WithLoss(nn.Module):
    """Returns the loss of its inputs and targets."""

    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x, y):
        return F.mse_loss(self.inner(x), y)


def case_fed():
    """Other examples, in other micro-batches, are replaced by those of the recording."""
    for path, number, parts, options in (
        ("given.npz", 0, 1, {}),
        ("fed.npz", 50, 1, {"replay": "given.npz", "feed_examples": True}),
        ("fed_in_parts.npz", 50, 3, {"replay": "given.npz", "feed_examples": True}),
    ):
        model = WithLoss()
        optimizer = momentum(model)
        with record_torch.record(path, model, optimizer, steps=2, **options):
            for step in range(3):
                for part in range(parts):
                    (model(*batch(number + step, part, parts)) / parts).backward()
                optimizer.step()
                optimizer.zero_grad()
    given, fed, in_parts = map(Trace, ("given", "fed", "fed_in_parts"))
    for step in range(2):
        for kind in ("data", "loss", "raw"):
            assert_equal(given.kind(kind, step), fed.kind(kind, step))
        for index in range(2):
            parts = [in_parts.kind("data", step)[f"{2 * part + index}"] for part in range(3)]
            np.testing.assert_array_equal(
                np.concatenate(parts), given.kind("data", step)[f"{index}"]
            )

    def without_loss():
        model = network()
        with record_torch.record("x.npz", model, momentum(model), steps=1, **options):
            model(batch(0)[0])

    trained("plain", steps=1)
    options["replay"] = "plain.npz"
    refused("feed_examples: the model returns no loss; targets outside", without_loss)
    model = network()
    refused("feed_examples: needs replay= and a recording of one process", record_torch.record,
            "x.npz", model, adamw(model), feed_examples=True)  # fmt: skip


def case_other_optimizer():
    """State is replayed where the other optimizer has the same slots."""
    sgd = trained("sgd", optimizer=momentum, steps=3).kind("before", 2)
    other = trained("sgd_adamw", steps=3, replay="sgd.npz")
    found = other.kind("before", 2)
    assert all(np.array_equal(sgd[x], found[x]) for x in other.about["gradients"])
    assert "0.weight/exp_avg" in found
    adam = trained(
        "adam", optimizer=lambda model: torch.optim.Adam(model.parameters(), 0.01), steps=3
    )
    found = trained("adam_adamw", steps=3, replay="adam.npz")
    assert_equal(adam.kind("before", 2), found.kind("before", 2))


def case_port():
    """Replays a trace with Keras' layouts, in which weights are drawn at random."""
    random = np.random.default_rng(0)
    about = {
        **{"format": "lockstep trace", "version": 2, "framework": "keras", "steps": [0]},
        **{"num_replicas": 1, "replicas": [0], "optimizer": {"class": "AdamW"}, "gradients": []},
        "variables": [
            {"name": name, "kind": kind, "layout": layout}
            for name, (kind, layout, _) in KERAS_VARIABLES.items()
        ],
    }
    shapes = [shape for _, _, shape in KERAS_VARIABLES.values()]
    arrays = [random.uniform(0.5, 1, shape).astype(np.float32) for shape in shapes]
    members = {f"1/before/0/{i}": array for i, array in enumerate(arrays)}
    trace_file.save(trace_file.from_parts(about, members), pathlib.Path("keras.npz"))
    given = {"num_steps": 1, "steps": 1, "replay": "keras.npz"}
    names = {"0.weight": "conv/kernel", "4.weight": "dense/kernel"}
    for each in ({}, names):
        before = trained("port", names=each, **given).kind("before")
        np.testing.assert_array_equal(before["0.weight"], arrays[0].transpose(3, 2, 0, 1))
        np.testing.assert_array_equal(before["4.weight"], arrays[4].T)
        of_norm = {"weight": 2, "bias": 3, "running_mean": 6, "running_var": 7}
        for leaf, index in of_norm.items():
            np.testing.assert_array_equal(before[f"1.{leaf}"], arrays[index])
    swapped = {"1.weight": "bn/beta", "1.bias": "bn/gamma"}
    swapped = trained("swapped", names=swapped, **given).kind("before")
    for own, other in {"1.weight": "1.bias", "1.bias": "1.weight", "0.bias": "0.bias"}.items():
        np.testing.assert_array_equal(before[own], swapped[other])


class Parts(nn.Module):
    """Has a part that is not used, and one that is not trained."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(5, 5), nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.used(x))


def one_step(path, model, inputs, num_steps=1, replay=None):
    """Trains with the sum of the outputs as loss; returns the recording."""
    optimizer = momentum(model)
    with record_torch.record(f"{path}.npz", model, optimizer, steps=num_steps, replay=replay):
        for _ in range(num_steps):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
    return Trace(path)


def case_gradients():
    """None has no array, a sparse one stays sparse, and 16 bits are written as 32."""
    trace = one_step("no_gradient", Parts(), torch.ones(4, 5))
    assert set(trace.kind("raw")) == set(trace.kind("clipped")) == {"used.weight", "used.bias"}
    assert {"unused.weight", "frozen.weight"} <= set(trace.kind("after"))
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Flatten())
    raw = one_step("sparse", model, torch.tensor([[1, 2], [2, 7]])).kind("raw")
    assert sorted(raw["0.weight/indices"].tolist()) == [1, 2, 2, 7]
    assert raw["0.weight/values"].shape == (4, 3) and raw["0.weight/rows"] == 10
    assert "0.weight" not in raw
    first, again = (
        one_step(path, nn.Linear(5, 5).bfloat16(), torch.ones(4, 5).to(torch.bfloat16), 2, replay)
        for path, replay in (("bfloat16", None), ("bfloat16_again", "bfloat16.npz"))
    )
    assert_equal(first.arrays, again.arrays)
    assert first.kind("after")["weight"].dtype == np.float32


class Converted(nn.Module):
    """Computes in 16 bits inside, and converts its outputs, as models of Accelerate do."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.layers(x).float()


def case_autocast():
    """The dtype in which layers compute is that of the training, not of an evaluation."""
    for create, is_outside, dtype in (
        (network, True, "float16"), (network, False, ""), (Converted, False, "float16"),
    ):  # fmt: skip
        model = create()
        optimizer = adamw(model)
        mixed = torch.autocast("cpu", dtype=torch.float16)
        with record_torch.record("autocast.npz", model, optimizer, steps=1):
            x, y = batch(0)
            with mixed if is_outside else contextlib.nullcontext():
                loss = F.mse_loss(model(x), y)
            loss.backward()
            with mixed, torch.no_grad():
                model(x)
            optimizer.step()
        assert Trace("autocast").about["computed_in"] == dtype


def case_modes():
    """Layers in evaluation mode are those of the training step, also if all are."""
    model = network(0.3)
    optimizer = adamw(model)
    with record_torch.record("modes.npz", model, optimizer, steps=3):
        for step, off in enumerate(([], [model[3]], [model])):
            for layer in off:
                layer.eval()
            x, y = batch(step)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
            for layer in off:
                layer.eval()
            optimizer.step()
    about = trace_file.load("modes.npz").about
    assert about.in_evaluation == ((), ("3",), ("", "0", "1", "2", "3", "4"))
    assert about.micro_batches == (1, 1, 1)


def case_repeated_update():
    """A second update with the same gradients belongs to the same step."""
    for steps in ([0, 1, 2], [0, 2]):
        model = network()
        optimizer = adamw(model)
        with record_torch.record("twice.npz", model, optimizer, steps=steps):
            for step in range(3):
                x, y = batch(step)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.step()
        twice = Trace("twice")
        assert twice.about["steps"] == steps and twice.kind("after", 2)["0.weight/step"] == 6
        assert twice.kind("before", 2)["0.weight/step"] == 4


class Tied(nn.Module):
    """Has two parts that may share their weights."""

    def __init__(self, is_tied):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        if not is_tied:
            self.second.weight = nn.Parameter(self.first.weight.detach().clone())

    def forward(self, x):
        return self.second(self.first(x))


def case_tied():
    """A copy of a weight that the other model ties has the recorded values of that weight."""
    one_step("tied", Tied(True), torch.ones(4, 5), 2)
    told = warnings_of(one_step, "untied", Tied(False), torch.ones(4, 5), 2, "tied.npz")
    found = Trace("untied")
    before = found.kind("before", 1)
    np.testing.assert_array_equal(before["second.weight"], before["first.weight"])
    assert Trace("tied").about["tied"] == [["first.weight", "second.weight"]]
    assert found.about["tied"] == []
    one_step("tied_again", Tied(True), torch.ones(4, 5), 2, "tied.npz")
    assert compare("tied.npz", "tied_again.npz").ok
    for paths in (("tied.npz", "untied.npz"), ("untied.npz", "tied.npz")):
        which = "first" if paths[0] == "tied.npz" else "second"
        text = f"first.weight and second.weight are one weight in the {which} recording only"
        verdict = compare(*paths)
        assert verdict.findings[0].detail == "other_tying", verdict
        assert text in " ".join(str(verdict).split())
    text = "tied.npz has one weight for first.weight and its copy second.weight"
    assert sum(text in each for each in told) == 1


def case_slots():
    """Optimizer state that the replayed file lacks is kept, as of other settings."""
    trained("plain", steps=3)
    given = {"steps": 3, "replay": "plain.npz"}
    amsgrad = trained("amsgrad", optimizer=lambda model: adamw(model, amsgrad=True), **given)
    assert "0.weight/max_exp_avg_sq" in amsgrad.kind("before", 2)


def case_skipped():
    """The update of the second batch is skipped, as a GradScaler does: the step begins again."""
    model = network()
    optimizer = adamw(model)
    with record_torch.record("skipped.npz", model, optimizer, steps=2):
        for step in range(3):
            x, y = batch(step)
            (F.mse_loss(model(x), y) * (float("inf") if step == 1 else 1)).backward()
            if step != 1:
                optimizer.step()
            optimizer.zero_grad()
    skipped = Trace("skipped")
    assert skipped.about["micro_batches"] == [1, 1] and skipped.about["steps"] == [0, 1]
    assert skipped.kind("data", 1).keys() == {"0"}


def case_scaled():
    """Gradients, losses and clipped norms of a GradScaler are recorded without its scale."""
    clip, found = nn.utils.clip_grad_norm_, {}
    for name, init_scale in (("plain", 1.0), ("scaled", 1024.0)):
        model = network()
        optimizer = adamw(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        with record_torch.record(f"{name}.npz", model, optimizer, steps=2):
            for number in range(5):
                x, y = batch(number)
                times = 0.5 if number else float("inf")  # The first update is skipped.
                scaler.scale(F.mse_loss(model(x), y) * times).backward()
                if number % 2 == 0:
                    scaler.unscale_(optimizer)
                    clip(model.parameters(), 0.5)
                    scaler.step(optimizer)
                    scaler.update()
                    for p in model.parameters():  # Not None, as zero_grad leaves them.
                        p.grad = torch.zeros_like(p)
        found[name] = Trace(name)
    plain, scaled = found.values()
    calls = ["forward", "backward", "forward", "backward", "unscale", "clip norm 0.5"]
    assert plain.about["calls"] == scaled.about["calls"] == [calls, calls]
    assert plain.about["loss_scale"] == [0.5, 0.5] and scaled.about["loss_scale"] == [512, 512]
    for kind in ("raw", "unclipped", "clipped", "loss"):
        for step in (0, 1):
            assert_close(plain.kind(kind, step), scaled.kind(kind, step))


def case_accumulation():
    model = network()
    optimizer, losses = adamw(model), []
    with record_torch.record("accumulation.npz", model, optimizer, steps=1):
        for step in range(2):
            x, y = batch(step)
            loss = F.mse_loss(model(x), y) / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    trace = Trace("accumulation")
    assert trace.about["micro_batches"] == [2]
    assert set(trace.kind("data")) == set(trace.kind("random")) == {"0", "1"}
    assert not np.array_equal(trace.kind("data")["0"], trace.kind("data")["1"])
    assert_equal(trace.kind("raw"), trace.kind("clipped"))
    np.testing.assert_allclose(trace.kind("loss")["0"], sum(losses), rtol=1e-6)


def case_two_models():
    """Trains a generator; the discriminator's loss is not part of its step."""
    model, other = nn.Linear(5, 5), nn.Linear(5, 1)
    optimizer, other_optimizer = adamw(model), adamw(other)
    with record_torch.record("two_models.npz", model, optimizer, steps=1):
        made = model(torch.ones(4, 5))
        (other(made.detach()).sum() + 1000).backward()
        other_optimizer.step()
        made.square().sum().backward()
        optimizer.step()
    loss = Trace("two_models").kind("loss")["0"]
    np.testing.assert_allclose(loss, made.square().sum().item(), rtol=1e-6)


class TwoHeads(nn.Module):
    """Returns two outputs, the second in a nest, and a number."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x):
        return [self.first(x), [self.second(x)]]


def case_outputs():
    """The loss uses the first output only; two forward passes."""
    model = TwoHeads()
    optimizer = adamw(model)
    with record_torch.record("outputs.npz", model, optimizer, steps=1):
        for _ in range(2):
            model(torch.ones(4, 5))[0].sum().backward()
        optimizer.step()
    y_pred, y_grad = (Trace("outputs").kind(kind) for kind in ("y_pred", "y_grad"))
    assert [len(x) for x in y_pred.values()] == [4] * 4
    assert not y_grad["1"].any() and not y_grad["3"].any()
    assert (y_grad["0"] == 1).all() and (y_grad["2"] == 1).all()


def case_exception():
    """What was recorded before is written."""
    model = network()
    optimizer = adamw(model)
    try:
        with record_torch.record("exception.npz", model, optimizer, steps=3):
            for step in range(3):
                x, y = batch(step)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                if step == 2:
                    raise RuntimeError("out of memory")
                optimizer.step()
    except RuntimeError as error:
        assert str(error) == "out of memory"
    about = Trace("exception").about
    assert about["steps"] == [0, 1] and about["asked"] == [0, 1, 2]
    assert about["ended_with"] == "RuntimeError: out of memory"
    assert not list(pathlib.Path().glob("*.tmp"))


def case_nested():
    models = [nn.Linear(5, 5), nn.Linear(5, 5)]
    optimizers, original = list(map(momentum, models)), torch.autograd.backward
    records = [
        record_torch.record(f"nested{i}.npz", models[i], optimizers[i], steps=[i]) for i in range(2)
    ]
    with records[0], records[1]:
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.ones(2, 5)).sum().backward()
                optimizer.step()
    assert torch.autograd.backward is original
    assert [Trace(f"nested{i}").about["steps"] for i in (0, 1)] == [[0], [1]]


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer and lacks its hooks, as the optimizer of Accelerate does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()


class CallsItself(nn.Module):
    """Computes the loss and calls itself for the output, as Lightning's models do with DDP."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x, y=None):
        return self.net(x) if y is None else F.mse_loss(self(x), y)


def train_with_closure(path, model, optimizer, num_calls=1, **options):
    """Trains as Lightning does: the optimizer calls the closure, which computes the gradients."""

    def closure():
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return loss

    with record_torch.record(path or None, model, optimizer, **options):
        for step in range(3):
            x, y = batch(step)
            for _ in range(num_calls - 1):
                closure()
            optimizer.step(closure)


def case_accelerate():
    plain, model = trained("plain", steps=3), network()
    train(model, Wrapper(Wrapper(adamw(model))), "wrapped.npz", steps=3)
    assert_equal(plain.arrays, Trace("wrapped").arrays)
    assert Trace("wrapped").about["optimizer"] == plain.about["optimizer"]


def case_lightning():
    for path, options in {
        "closure.npz": {},
        "closure_again.npz": {"replay": "plain.npz"},
        "closure_permuted.npz": {"replay": "closure.npz", "permute": 1},
        "accumulated.npz": {"num_calls": 2},
    }.items():
        model = CallsItself()
        train_with_closure(path, model, adamw(model), steps=3, **options)
    plain, trace = Trace("plain"), Trace("closure")
    assert_equal(plain.arrays, trace.arrays)
    assert_equal(plain.arrays, Trace("closure_again").arrays)
    assert trace.about["micro_batches"] == [1, 1, 1]
    assert Trace("accumulated").about["micro_batches"] == [2, 2, 2]
    permuted = Trace("closure_permuted")
    for step in range(3):
        assert not np.array_equal(trace.kind("data", step)["0"], permuted.kind("data", step)["0"])
        for kind in ("raw", "clipped"):
            assert_close(
                {name.removeprefix("net."): x for name, x in trace.kind(kind, step).items()},
                {name.removeprefix("net."): x for name, x in permuted.kind(kind, step).items()},
            )


def refused(expected, function, *args, **options):
    """Checks that a call is refused with one line that begins so."""
    try:
        function(*args, **options)
    except ValueError as error:
        assert str(error).startswith(expected) and "\n" not in str(error), error
    else:
        raise AssertionError(f"not refused: {expected}")


class Halves(nn.Module):
    """Has two parts, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.second(self.first(x.reshape(len(x), -1)))


def train_halves(path, optimizers, given=None, model=None, **options):
    """Trains with several optimizers, which all step after the backward pass."""
    model = Halves() if model is None else model
    both = optimizers(model)
    chosen = {"optimizer": given(both)} if given else {}
    with record_torch.record(path, model, **chosen, **options):
        for step in range(3):
            x, y = batch(step)
            for each in both:
                each.zero_grad()
            F.mse_loss(model(x), y).backward()
            for each in both:
                each.step()
    return [x.clone() for x in model.state_dict().values()]


def two_kinds(rate=0.01):
    """Returns a function that gives each half an optimizer."""

    def create(model):
        first = torch.optim.SGD(model.first.parameters(), 0.1, momentum=0.9)
        return [first, torch.optim.AdamW(model.second.parameters(), rate)]

    return create


def case_two_optimizers():
    """Both are seen, also those that are not passed; each weight has the rule of its own."""
    bits = train_halves(None, two_kinds())
    expected = None
    for given in (None, list, lambda both: both[0], lambda both: both[1]):
        assert is_equal(bits, train_halves("halves.npz", two_kinds(), given, steps=[0, 2]))
        trace = Trace("halves")
        expected = expected or trace
        assert_equal(trace.arrays, expected.arrays)
        assert trace.about["settings"] == expected.about["settings"]
    groups = [(group["optimizer"], group["weights"]) for group in trace.about["settings"][0]]
    assert groups == [
        ("SGD", ["first.weight", "first.bias"]), ("AdamW", ["second.weight", "second.bias"]),
    ]  # fmt: skip
    after = trace.kind("after")
    assert {"first.bias/momentum_buffer", "second.bias/exp_avg"} <= after.keys()
    before = trace.kind("before")
    assert all(not np.array_equal(before[name], after[name]) for name in trace.about["gradients"])
    # Each half is checked by its own rule, and a wrong one of the second has a name.
    train_halves("one.npz", two_kinds(), steps=3)
    train_halves("same.npz", two_kinds(), steps=3, replay="one.npz")
    assert compare("one.npz", "same.npz").ok
    train_halves("wrong.npz", two_kinds(0.02), steps=3, replay="one.npz")
    assert {f.detail for f in compare("one.npz", "wrong.npz").faults} == {"other_learning_rate"}
    assert compare("one.npz").ok and compare("wrong.npz").ok


def train_in_turns(path, in_one_pass=False, rate=0.01, **options):
    """Updates one half after the other: each after a forward pass, or both after one."""
    model = Halves()
    first, second = two_kinds(rate)(model)
    with record_torch.record(path, model, **options):
        for step in range(4):
            x, y = batch(step)
            outputs = model(x)
            for each in (first, second) if in_one_pass else (second if step % 2 else first,):
                model_of = model.second if each is second else model.first
                for p in model.parameters():
                    p.grad = None
                inputs = [*model_of.parameters()]
                loss = F.mse_loss(outputs, y)
                torch.autograd.backward(loss, inputs=inputs, retain_graph=in_one_pass)
                each.step()
    return [x.clone() for x in model.state_dict().values()]


def case_optimizers_in_turns():
    """As of a generator and a discriminator."""
    for options in ({}, {"in_one_pass": True}):
        bits = train_in_turns(None, **options)
        assert is_equal(bits, train_in_turns("turns.npz", steps=4, **options))
        trace = Trace("turns")
        kinds = [[group["optimizer"] for group in each] for each in trace.about["settings"]]
        expected = [["SGD", "AdamW"]] * 4 if options else [["SGD"], ["AdamW"]] * 2
        assert trace.about["steps"] == [0, 1, 2, 3] and kinds == expected
        train_in_turns("same.npz", steps=4, replay="turns.npz", **options)
        assert compare("turns.npz", "same.npz").ok
        train_in_turns("wrong.npz", steps=4, rate=0.02, replay="turns.npz", **options)
        found = {f.detail for f in compare("turns.npz", "wrong.npz").faults}
        assert found == {"other_learning_rate"}, found


def train_in_backward(path, every=1, **options):
    """Trains with an optimizer for each weight, which steps in a hook of the backward pass."""
    model = Halves()
    optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

    def hook(p):
        p.grad *= every
        optimizers[p].step()
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(hook) for p in optimizers]
    with record_torch.record(path, model, **options):
        for step in range(3):
            x, y = batch(step)
            F.mse_loss(model(x), y).backward()
    for handle in handles:
        handle.remove()
    return [x.clone() for x in model.state_dict().values()]


def case_optimizers_in_backward():
    """The update of each weight is part of the step; gradients are those before the hook."""
    bits = train_in_backward(None)
    assert is_equal(bits, train_in_backward("in_backward.npz", steps=2))
    trace = Trace("in_backward")
    assert trace.about["steps"] == [0, 1] and trace.about["micro_batches"] == [1, 1]
    assert trace.kind("raw").keys() == trace.kind("clipped").keys() == {*trace.about["gradients"]}
    assert "second.bias/momentum_buffer" in trace.kind("after") and "0" in trace.kind("loss")
    # It is the same training as with one optimizer after the backward pass.
    train_halves("after.npz", lambda model: [momentum(model)], steps=2)
    train_in_backward("again.npz", steps=2, replay="after.npz")
    assert compare("after.npz", "again.npz").ok
    train_in_backward("wrong.npz", every=2, steps=2, replay="after.npz")
    assert not compare("after.npz", "wrong.npz").ok


def case_ambiguous_optimizers():
    """Two optimizers have state of a weight: the script must say which one trains."""
    model = Halves()
    optimizers = [momentum(model), momentum(model)]
    for optimizer in optimizers:
        F.mse_loss(model(batch(0)[0]), batch(0)[1]).backward()
        optimizer.step()
    text = "optimizer: 2 optimizers have state of first.weight; pass those that train the model"
    refused(text, record_torch.record, "x.npz", model)
    record_torch.record("x.npz", model, optimizers[1])


def resumed(path, forgets, **options):
    """Trains two steps, and then two more with what a checkpoint has kept; records the latter."""
    model = network()
    optimizer = adamw(model)
    train_some(model, optimizer, range(2))
    if forgets:
        optimizer.state.clear()
    with record_torch.record(path, model, optimizer, **options):
        train_some(model, optimizer, range(2, 4))
    return Trace(path.removesuffix(".npz"))


def train_some(model, optimizer, steps):
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def case_first_step():
    """A resumed job counts as the reference does; state that it has lost has a name."""
    model = network()
    optimizer = adamw(model)
    with record_torch.record("whole.npz", model, optimizer, steps=4):
        train_some(model, optimizer, range(4))
    later = {"first_step": 2, "replay": "whole.npz"}
    assert resumed("resumed.npz", False, steps=2, **later).about["steps"] == [2, 3]
    assert resumed("resumed.npz", False, steps=[3], **later).about["asked"] == [3]
    resumed("resumed.npz", False, steps=2, **later)
    assert compare("whole.npz", "resumed.npz").ok
    resumed("forgotten.npz", True, steps=2, **later)
    causes = [(f.cause, f.steps) for f in compare("whole.npz", "forgotten.npz").faults]
    assert causes == [("state_lost", (2,))], causes
    refused("steps=[1]: must be numbers from 2", record_torch.record, "x.npz", model, optimizer,
            steps=[1], first_step=2)  # fmt: skip
    refused("first_step=-1: must be a number from 0", record_torch.record, "x.npz", model,
            optimizer, first_step=-1)  # fmt: skip


def train_with_average(path, keep=0.9, is_mapping=True, **options):
    """Trains, and averages the weights after each update, in a mapping or in a model."""
    model, other = Halves(), Halves()
    optimizer = momentum(model)
    mapping = {name: p.detach().clone() for name, p in model.named_parameters()}
    average = mapping if is_mapping else other
    with record_torch.record(path, model, optimizer, others={"ema": average}, **options):
        for step in range(3):
            train_some(model, optimizer, [step])
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if is_mapping:
                        mapping[name] = keep * mapping[name] + (1 - keep) * p.detach()
                for own, p in zip(other.parameters(), model.parameters(), strict=True):
                    own.copy_(keep * own + (1 - keep) * p)


def case_averages_of_weights():
    """An average belongs to the training: to each step, also to the last one."""
    for is_mapping in (True, False):
        options = {"steps": 3, "is_mapping": is_mapping}
        train_with_average("average.npz", **options)
        trace = Trace("average")
        before, after = (trace.kind(kind, 2)["ema.first.bias"] for kind in ("before", "after"))
        expected = 0.9 * before + 0.1 * trace.kind("after", 2)["first.bias"]
        np.testing.assert_allclose(after, expected, rtol=1e-6)
        train_with_average("again.npz", replay="average.npz", **options)
        assert compare("average.npz", "again.npz").ok
        train_with_average("wrong.npz", keep=0.8, replay="average.npz", **options)
        faults = compare("average.npz", "wrong.npz").faults
        assert faults and faults[0].stage == "statistics", faults
        assert all(name.startswith("ema.") for fault in faults for name in fault.tensors)
    model = Halves()
    refused("others: have names of the model's own weights", record_torch.record, "x.npz", model,
            momentum(model), others={"first": {"bias": torch.ones(8)}})  # fmt: skip


def train_adversaries(path, order, rate=0.01, **options):
    """Updates a critic, then a generator, whose backward pass also adds to the critic's gradients.

    Args:
        path: of the recording.
        order: of the examples; another one moves the last bits.
        rate: learning rate of the critic.
    """
    torch.manual_seed(0)
    made, critic = nn.Linear(5, 8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    of_critic = torch.optim.Adam(critic.parameters(), rate)
    of_made = torch.optim.Adam(made.parameters(), 0.01)
    both = nn.ModuleDict({"made": made, "critics": nn.ModuleList([critic])})
    x, z = torch.randn(10, 40, 8)[:, order], torch.randn(10, 40, 5)[:, order]
    with record_torch.record(path, both, of_critic, steps=20, **options):
        for real, noise in zip(x, z, strict=True):
            of_critic.zero_grad()
            loss = (
                F.softplus(-critic(real)).mean() + F.softplus(critic(made(noise).detach())).mean()
            )
            loss.backward()
            of_critic.step()
            of_made.zero_grad()
            F.softplus(-critic(made(noise))).mean().backward()
            of_made.step()


def case_two_parts_in_turns():
    """Each step begins at the first call of a part, and has the weights that its optimizer has."""
    order = torch.arange(40)
    train_adversaries("adversaries.npz", order)
    train_adversaries("same.npz", order.flip(0), replay="adversaries.npz")
    one, same = Trace("adversaries"), Trace("same")
    assert one.about["steps"] == same.about["steps"] == [*range(20)]
    ends = [trace.kind("after", 19)["made.weight"] for trace in (one, same)]
    assert not np.array_equal(*ends)
    for step in range(20):
        assert_equal(one.kind("before", step), same.kind("before", step))
        found = {name.split(".")[0] for name in one.kind("clipped", step)}
        assert found == {"made" if step % 2 else "critics"}, (step, found)
    verdict = compare("adversaries.npz", "same.npz")
    assert verdict.ok, verdict
    train_adversaries("wrong.npz", order, 0.02, replay="adversaries.npz")
    found = {f.detail for f in compare("adversaries.npz", "wrong.npz").faults}
    assert found == {"other_learning_rate"}, found


def case_parts_of_a_model():
    """Without a forward pass of the whole model, a step begins with that of a part."""
    model = Halves()
    optimizer = momentum(model)
    with record_torch.record("parts.npz", model, optimizer, steps=2):
        for step in range(3):
            x, y = batch(step)
            optimizer.zero_grad()
            F.mse_loss(model.second(model.first(x.reshape(len(x), -1))), y).backward()
            optimizer.step()
    trace = Trace("parts")
    assert trace.about["steps"] == [0, 1]
    assert_equal(trace.kind("raw", 1), trace.kind("clipped", 1))


class Counting(torch.optim.SGD):
    """Keeps the rows of a momentum that this process owns, and a number."""

    rows = 4

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["number"], state["own"] = 0, torch.zeros_like(p)[: self.rows]
                assert state["own"].shape[0] == self.rows
                state["number"] += 1
                state["own"] += p.grad[: self.rows]
                p -= group["lr"] * p.grad


def case_state_that_does_not_fit():
    """What does not fit is not loaded, and a warning says so; the training continues."""
    for path, rows, told_of in (
        ("rows.npz", 4, 0), ("half.npz", 2, 0), ("third.npz", 3, 1),
    ):  # fmt: skip
        Counting.rows = rows
        model = nn.Linear(64, 4)
        optimizer = Counting(model.parameters(), 0.1)
        options = {"replay": "rows.npz"} if path != "rows.npz" else {}

        def train(model=model, optimizer=optimizer, path=path, options=options):
            with record_torch.record(path, model, optimizer, steps=3, **options):
                for step in range(3):
                    x = batch(step)[0]
                    optimizer.zero_grad()
                    model(x.reshape(len(x), -1)).square().mean().backward()
                    optimizer.step()

        told = [text for text in warnings_of(train) if "not loaded" in text]
        assert len(told) == told_of, told
        trace = Trace(path.removesuffix(".npz"))
        assert trace.kind("before", 2)["weight/number"] == 2
        assert trace.about["not_loaded"] == ["weight/own", "bias/own"] * told_of
        if rows == 2:
            expected = Trace("rows").kind("before", 2)["weight/own"][:2]
            np.testing.assert_array_equal(trace.kind("before", 2)["weight/own"], expected)
    start = "third.npz: step 1: not loaded from rows.npz: weight/own, bias/own: not in it, of"
    assert told[0].startswith(start), told


def case_missing_functions():
    """A function that is observed and does not exist would hide a call."""
    model, clipping = Halves(), nn.utils.clip_grad
    original = clipping._clip_grads_with_norm_
    del clipping._clip_grads_with_norm_
    try:
        record_torch.record("x.npz", model, momentum(model))
    except RuntimeError as error:
        assert f"PyTorch {torch.__version__} has no" in str(error)
        assert "_clip_grads_with_norm_, which is observed" in str(error)
    else:
        raise AssertionError("not refused")
    finally:
        clipping._clip_grads_with_norm_ = original


SHARDED = "fully_shard of PyTorch 2.7.1; needs 2.8 or newer"


def case_versions():
    """A PyTorch that is too old is refused: when the recorder is imported, or for a model."""
    own, here = torch.__version__, f"file://{os.getcwd()}/alone"
    dist.init_process_group("gloo", init_method=here, rank=0, world_size=1)
    sharded = nn.Sequential(nn.Linear(4, 2))
    fully_shard(sharded)
    recorders = [name for name in sys.modules if name.startswith("lockstep.record")]
    loaded = {name: sys.modules.pop(name) for name in recorders}
    try:
        torch.__version__ = "2.5.1+cu124"
        try:
            importlib.import_module("lockstep.record_torch")
        except ImportError as error:
            expected = "record_torch: PyTorch 2.5.1+cu124, needs 2.6 or newer"
            assert str(error) == expected, error
        else:
            raise AssertionError("not refused")
        torch.__version__ = "2.6.0"
        importlib.import_module("lockstep.record_torch")
        torch.__version__ = "2.7.1"
        refused(f"model: {SHARDED}", record_torch.record, "x.npz", sharded, momentum(sharded))
        torch.__version__ = "2.8.0"
        record_torch.record("x.npz", sharded, momentum(sharded))
    finally:
        torch.__version__ = own
        sys.modules.update(loaded)
        dist.destroy_process_group()


def warnings_of(function, *args, **options):
    """Returns the texts of the warnings of a call."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        function(*args, **options)
    return [str(warning.message) for warning in told]


def case_replay_in_evaluation():
    """Where nothing can be loaded, the training continues, and a warning says so."""
    model = network()
    model.eval()
    path, options = "evaluation.npz", {"steps": 1, "replay": "first.npz"}
    told = warnings_of(train, model, adamw(model), path, **options)
    text = "evaluation.npz: replay: step 0: the model is called in evaluation mode"
    assert [each for each in told if each.startswith(text)], told
    assert Trace("evaluation").replaced


def case_errors():
    model = network()
    optimizer, record, larger = adamw(model), record_torch.record, nn.Linear(7, 5)

    with open("damaged.npz", "wb") as file:
        file.write(b"damaged")
    with np.load("first.npz") as file:
        np.savez("later.npz", about=str(file["about"]).replace('"version": 2', '"version": 3'))
    cases = [
        ("model: DataParallel cannot be recorded; use DDP or fully_shard",
         nn.DataParallel(model), optimizer, {}),
        ("optimizer: updates no weight of the model: it is that of another one",
         larger, optimizer, {}),
        ("steps=[-1]: must be numbers from 0", model, optimizer, {"steps": [-1]}),
        ("steps=0: must be numbers from 0", model, optimizer, {"steps": 0}),
        ("replay=first.npz: lacks steps [9]; it has [", model, optimizer,
         {"steps": [9], "replay": "first.npz"}),
        ("replay=absent.npz: does not exist, nor does absent.rank0.npz; pass", model, optimizer,
         {"replay": "absent.npz"}),
        ("replay=later.npz: has the format version 3, and this version of", model, optimizer,
         {"replay": "later.npz"}),
        ("replay=damaged.npz: is no .npz file or is damaged", model, optimizer,
         {"replay": "damaged.npz"}),
        ("replay=first.npz: no weight fits weight (5, 7); it has 0.weight (4, 1, 2, 2)", larger,
         adamw(larger), {"steps": [0], "replay": "first.npz"}),
        ("replay=first.npz: no weight fits 1.bias (4,); it has 0.weight", model, optimizer,
         {"steps": [0], "replay": "first.npz", "names": {"1.bias": "4.weight"}}),
    ]  # fmt: skip
    cases += [
        ("shards='each': must be 'each', with replay= and in one process", model, optimizer,
         {"shards": "each"}),
        ("shards='all': must be 'each', with replay= and in one process", model, optimizer,
         {"shards": "all", "replay": "first.npz"}),
    ]  # fmt: skip
    for expected, *arguments, options in cases:
        refused(expected, record, "x.npz", *arguments, **options)
    for path in ("x.npy", "nowhere/x.npz"):
        expected = f"{path}: must be an .npz file in a folder that exists"
        refused(expected, record, path, model, optimizer)


def case_several_closure_calls():
    """LBFGS calls a closure several times in a step: its steps are left out, with one warning."""
    trained = []
    for path in (None, "lbfgs.npz"):
        model = CallsItself()
        optimizer = torch.optim.LBFGS(model.parameters(), 0.01, max_iter=2)
        with warnings.catch_warnings(record=True) as told:
            train_with_closure(path, model, optimizer, steps=3)
        trained.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *trained))
    assert ["calls its closure several times" in str(each.message) for each in told] == [True]
    try:
        compare("lbfgs.npz", "lbfgs.npz")
    except ValueError as error:
        assert "lbfgs.npz: has no steps" in str(error)
    else:
        raise AssertionError("nothing was recorded")


def case_functions_of_gradients():
    """Gradients of each example by torch.func: what is applied is recorded, and compared."""

    def loss_of(weights, x, y):
        return F.mse_loss(functional_call(model, weights, (x[None],)), y[None])

    trained = []
    for path in (None, "dp.npz", "dp_again.npz", "dp_scaled.npz"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
        optimizer = adamw(model)
        recording = record_torch.record(path, model, optimizer, steps=3, modules=True)
        with warnings.catch_warnings(record=True) as told, recording:
            for step in range(3):
                weights = {n: p.detach() for n, p in model.named_parameters()}
                of_examples = vmap(grad(loss_of), (None, 0, 0))(weights, *batch(step))
                for name, p in model.named_parameters():
                    p.grad = of_examples[name].mean(0) * (2 if path == "dp_scaled.npz" else 1)
                optimizer.step()
                optimizer.zero_grad()
        trained.append([p.detach().clone() for p in model.parameters()])
        within = ["called within torch.func" in str(each.message) for each in told]
        assert within == ([True] if path else [])
    assert all(map(torch.equal, *trained[:2]))
    assert compare("dp.npz", "dp_again.npz").ok
    found = compare("dp.npz", "dp_scaled.npz")
    assert found.faults[0].detail == "scaled_gradient", str(found)


def case_compiled():
    model = network()
    expected = train(model, adamw(model))
    model = network()
    compiled = torch.compile(model, backend="eager")
    assert is_equal(expected, train(compiled, adamw(model), "compiled.npz", steps=3))
    trace = Trace("compiled")
    assert trace.about["gradients"][0] == "0.weight" and trace.kind("data")


# --- Two processes ---------------------------------------------------------------------------


def of_all_ranks(name):
    """Returns a recording, once both processes have written their parts."""
    dist.barrier()
    return Trace(name)


def ddp(path, model=None, **options):
    model = DistributedDataParallel(network() if model is None else model)
    return train(model, adamw(model), path, shards=(dist.get_rank(), 2), **options)


def case_ddp():
    for path, options in {
        "ddp.npz": {},
        "ddp_again.npz": {"replay": "ddp.npz"},
        "ddp_permuted.npz": {"replay": "ddp.npz", "permute": 1},
    }.items():
        ddp(path, steps=3, **options)
    assert is_equal(ddp(None, network(0.2)), ddp("ddp_bits.npz", network(0.2), steps=[1, 2]))
    trace, permuted = of_all_ranks("ddp"), Trace("ddp_permuted")
    assert [about["replicas"] for about in trace.abouts] == [[0], [1]]
    assert trace.about["num_replicas"] == 2 and trace.about["reduction"] == "mean"
    assert trace.about["wrapper"] == "DistributedDataParallel"
    assert trace.about["passes"] == [["ddp"]] * 3
    for step in range(3):
        for replica in range(2):
            assert_equal(trace.kind("sums", step, replica), mean_of_raw(trace, step))
        assert_equal(trace.kind("clipped", step), trace.kind("clipped", step, 1))
        assert norm_of(trace.kind("clipped", step)) <= 0.5 + 1e-6
        a, b = (trace.kind("data", step, replica)["0"] for replica in range(2))
        assert len(a) == len(b) == 6 and not np.array_equal(a, b)
        assert not np.array_equal(a, permuted.kind("data", step)["0"])
        assert_close(trace.kind("sums", step), permuted.kind("sums", step))
    assert_equal(trace.arrays, Trace("ddp_again").arrays)
    assert compare("ddp.npz").ok


def case_bypass():
    """The bugs of scripts: no all-reduce, in the first step; clipping on one replica."""
    model = DistributedDataParallel(network())
    optimizer = adamw(model)
    with record_torch.record("bypass.npz", model, optimizer, steps=2):
        for step in range(2):
            x, y = batch(step, dist.get_rank(), 2)
            optimizer.zero_grad()
            F.mse_loss((model if step else model.module)(x), y).backward()
            if dist.get_rank():
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
    trace = of_all_ranks("bypass")
    assert not trace.kind("sums", 0) and trace.kind("sums", 1)
    assert trace.about["passes"] == [["module"], ["ddp"]]
    assert_equal(trace.kind("raw", 0), trace.kind("clipped", 0))
    assert [(f.stage, f.detail) for f in compare("bypass.npz").faults] == [
        ("clipping", "clipped_on_one_replica"),
        ("all-reduce", "not_all_reduced"),
    ]


def case_no_sync():
    """Accumulated gradients are sent once; the second step never sends them."""
    model = DistributedDataParallel(network())
    optimizer = adamw(model)
    with record_torch.record("no_sync.npz", model, optimizer, steps=2):
        for is_synchronised in (True, False):
            optimizer.zero_grad()
            for step in range(2):
                x, y = batch(step, dist.get_rank(), 2)
                is_sent = is_synchronised and step == 1
                with contextlib.nullcontext() if is_sent else model.no_sync():
                    F.mse_loss(model(x), y).backward()
            optimizer.step()
    trace = of_all_ranks("no_sync")
    assert trace.about["micro_batches"] == [2, 2] and len(trace.kind("data")) == 2
    assert trace.kind("raw", 1) and not trace.kind("sums", 1)
    assert trace.about["passes"] == [["no_sync", "ddp"], ["no_sync", "no_sync"]]
    assert_close(trace.kind("sums"), mean_of_raw(trace, 0))


def whole(trace, kind, step):
    """Returns arrays of which each of two processes has a part of the first dimension."""
    of_rank = [trace.kind(kind, step, rank) for rank in range(2)]
    parts = [name for name, x in of_rank[0].items() if x.ndim and "running" not in name]
    return of_rank[0] | {name: np.concatenate([x[name] for x in of_rank]) for name in parts}


def case_fsdp():
    ddp("ddp.npz", steps=3)
    dist.barrier()
    bits = []
    for path, options in {
        "fsdp.npz": {"steps": 3},
        "fsdp_again.npz": {"steps": 3, "replay": "fsdp.npz"},
        "ddp_fsdp.npz": {"steps": 3, "replay": "ddp.npz"},
        "": {},
        "fsdp_bits.npz": {"steps": [1]},
    }.items():
        model = network()
        fully_shard(model[4])
        fully_shard(model)
        train(model, adamw(model), path, shards=(dist.get_rank(), 2), **options)
        dist.barrier()  # Each process replays the parts of both.
        bits.append([p.full_tensor() for p in model.parameters()])
    assert is_equal(*bits[-2:])
    trace, replayed, original = of_all_ranks("fsdp"), Trace("ddp_fsdp"), Trace("ddp")
    assert trace.about["wrapper"] == "fully_shard" and trace.about["reduction"] == ""
    about = trace.abouts[1]
    assert (about["mesh"], about["data_axes"]) == ({"data": 2}, ["data"])
    assert about["ranks"] == [1] and about["num_replicas"] == 2 and "replicas" not in about
    assert not trace.kind("raw")
    # Rows of parts, of which the last may have less.
    assert [trace.kind("before", 0, r)["4.weight"].shape for r in (0, 1)] == [(3, 64), (2, 64)]
    index = trace.about["gradients"].index("4.weight")
    assert about["placements"][f"clipped/{index}"] == "d0[data] d1"
    assert_equal(trace.arrays, Trace("fsdp_again").arrays)
    for step in range(3):
        assert_close(whole(replayed, "sums", step), original.kind("sums", step))
        assert_equal(original.kind("before", step), whole(replayed, "before", step))


def record_one_process():
    """Records the training of one process that the cases of two are compared with."""
    model = Halves()
    train_halves("single.npz", lambda model: [adamw(model)], model=model)
    train_rows("rows_of_one.npz", model=Halves(), replay=None)
    train_averaged("averaged_by_one.npz")


def train_averaged(path, keeper=0, share=0.1, **options):
    """Trains with an average of the weights, which one process keeps."""
    own, average = Halves(), Halves()
    rank, num = (dist.get_rank(), 2) if dist.is_initialized() else (0, 1)
    model = DistributedDataParallel(own) if num > 1 else own
    optimizer, others = adamw(model), {"average": average} if rank == keeper else None
    with record_torch.record(path, model, optimizer, steps=3, others=others, **options):
        for step in range(3):
            x, y = batch(step, rank, num)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for a, p in zip(average.parameters(), own.parameters(), strict=True):
                    a.lerp_(p, share)


def case_average_of_one_rank():
    """One rank may keep the average of the weights, which is compared there."""
    for keeper in (0, 1):
        for share, is_right in ((0.1, True), (0.2, False)):
            name = f"average_{keeper}_{is_right}"
            train_averaged(f"{name}.npz", keeper=keeper, share=share, replay="averaged_by_one.npz")
            verdict = of_all_ranks(name) and compare("averaged_by_one.npz", f"{name}.npz")
            assert verdict.ok == is_right, str(verdict)
            assert {f.stage for f in verdict.faults} == ({"statistics"} if not is_right else set())


class OwnRows(torch.optim.SGD):
    """Sums gradients itself; each rank has the momentum of its rows, and updates these."""

    divides = True

    @torch.no_grad()
    def step(self):
        rank, world = (dist.get_rank(), 2) if dist.is_initialized() else (0, 1)
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad.clone()
                if world > 1:
                    dist.all_reduce(gradient)
                    gradient /= world if self.divides else 1
                rows = torch.arange(len(p)).chunk(world)[rank]
                state = self.state[p]
                if not state:
                    state["momentum_of_rows"] = torch.zeros_like(p[rows])
                state["momentum_of_rows"].mul_(0.9).add_(gradient[rows])
                own = p[rows] - group["lr"] * state["momentum_of_rows"]
                parts = [torch.empty_like(own) for _ in range(world)]
                if world > 1:
                    dist.all_gather(parts, own)
                p.copy_(torch.cat(parts) if world > 1 else own)


def train_rows(path, model, replay, divides=True):
    rank, world = (dist.get_rank(), 2) if dist.is_initialized() else (0, 1)
    model.second = nn.Linear(8, 6)  # Rows for both ranks.
    torch.manual_seed(1)
    for p in model.parameters():
        nn.init.uniform_(p, -0.1, 0.1)
    optimizer = OwnRows(model.parameters(), 0.1)
    optimizer.divides = divides
    with record_torch.record(path, model, optimizer, replay=replay):
        for step in range(3):
            x, y = batch(step, rank, world)
            optimizer.zero_grad()
            F.mse_loss(model(x)[:, :5], y).backward()
            optimizer.step()


def case_owned_state():
    """Optimizers that split their state, or reduce gradients themselves; and wrong twins."""
    for path, rate, is_right in (("zero.npz", 0.01, True), ("other_rate.npz", 0.02, False)):
        model = DistributedDataParallel(Halves())
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=rate if dist.get_rank() else 0.01
        )
        with record_torch.record(path, model, replay="single.npz"):
            for step in range(3):
                x, y = batch(step, dist.get_rank(), 2)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
        verdict = of_all_ranks(path.removesuffix(".npz")) and compare("single.npz", path)
        assert verdict.ok == is_right, str(verdict)
    for path, divides in (("rows.npz", True), ("sum.npz", False)):
        told = warnings_of(train_rows, path, Halves(), "rows_of_one.npz", divides)
        assert not [text for text in told if "not loaded" in text]
        trace = of_all_ranks(path.removesuffix(".npz"))
        verdict = compare("rows_of_one.npz", path)
        assert verdict.ok == divides, str(verdict)
        assert trace.kind("before", 2)["first.weight/momentum_of_rows"].shape == (4, 64)
    assert {f.detail for f in verdict.faults} == {"sum_instead_of_mean"}, str(verdict)


def case_mesh():
    """DDP and a mesh that is given: only its data axis makes replicas."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    ddp("mesh.npz", steps=1, mesh=mesh, dims="b[dp]")
    of_all_ranks("mesh")
    about = Trace("mesh").abouts[1]
    assert (about["mesh"], about["data_axes"]) == ({"dp": 2, "tp": 1}, ["dp"])
    assert (about["num_replicas"], about["ranks"]) == (2, [1])
    assert about["placements"]["data/0"] == "b[dp] d1 d2 d3"
    for expected, options in {
        "dims: needs mesh=": {"dims": "b[dp]"},
        "dims: 'b[cp]': mesh has no axis cp": {"dims": "b[cp]", "mesh": mesh},
        "dims: 'b[dp' in 'b[dp'": {"dims": "b[dp", "mesh": mesh},
        "dims: 'o i' is not that of 4.bias": {"dims": {"4.*": "o i"}, "mesh": mesh},
    }.items():
        model = network()
        refused(expected, record_torch.record, "x.npz", model, adamw(model), **options)


CASES = {
    "one": [
        *(case_format, case_bits, case_replay, case_gradients, case_autocast, case_modes),
        *(case_repeated_update, case_slots, case_skipped, case_scaled, case_accumulation),
        *(case_two_models, case_outputs, case_two_optimizers, case_ambiguous_optimizers),
        *(case_first_step, case_parts_of_a_model, case_two_parts_in_turns, case_exception),
        case_missing_functions,
        *(case_nested, case_accelerate, case_lightning, case_replay_in_evaluation, case_errors),
        *(case_several_closure_calls, case_functions_of_gradients, case_modules_of_shards),
        *(case_compiled, case_versions),
    ],
    "more": [
        *(case_shards, case_fed, case_port, case_other_optimizer, case_tied),
        *(case_optimizers_in_turns, case_optimizers_in_backward, case_averages_of_weights),
        case_state_that_does_not_fit,
    ],
    "two": [case_ddp, case_bypass, case_no_sync],
    "sharded": [case_fsdp, case_owned_state, case_average_of_one_rank, case_mesh],
}
NUM_PROCESSES = {"two": 2, "sharded": 2, "four": 4}


def run(rank, kind):
    if kind == "four":
        import torch_mesh_cases

        CASES[kind] = torch_mesh_cases.CASES
        if rank == 0:
            torch_mesh_cases.record_one_process()  # Before they find each other.
    if kind == "sharded" and rank == 0:
        record_one_process()
    if number := NUM_PROCESSES.get(kind):
        init = f"file://{os.getcwd()}/rendezvous"
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=number)
    run_cases(CASES[kind])
    if number:
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # Destroying the group aborts now and then, in a thread of gloo.


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    if number := NUM_PROCESSES.get(sys.argv[2]):
        torch.multiprocessing.spawn(run, (sys.argv[2],), nprocs=number)
    else:
        run(0, sys.argv[2])
