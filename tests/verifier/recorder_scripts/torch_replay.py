"""Cases of PyTorch: what is loaded from another recording."""
# ruff: noqa: F403, F405 (the names of `torch_training`)

import functools
import json
import shutil

import numpy as np
import torch
from torch import nn

from lockstep import compare
from recording import Trace
from torch_training import *


def case_replay():
    """The weights are those of the other recording, which may be of several processes."""
    steps = {"steps": [0, 1, 3]}
    first = recorded("first", **steps)
    assert norm_of(first.kind("clipped")) <= 0.5 + 1e-6 < norm_of(first.kind("raw"))
    shutil.copy("first.npz", "ranks.rank0.npz")
    for name, options in {
        "again": {"replay": "first.npz"}, "of_rank": {"replay": "ranks.npz"},
        "permuted": {"replay": "first.npz", "permute": 1},
    }.items():  # fmt: skip
        model = network()
        nn.init.ones_(model[0].weight)
        again = recorded(name, model, **options, **steps)
        assert again.about["replayed"] == options["replay"]
        if name != "permuted":
            assert_equal(first.arrays, again.arrays)
            assert again.replaced["1/replaced/0/0"].min() == 1  # What the script starts from.
            assert {*again.about["aliases"]} >= {
                n for n in again.replaced if n.startswith("2/replaced/")
            }
    # The weights that replay= has replaced are another start.
    place = compare("first.npz", "again.npz").place
    assert (place.node, place.step, place.tensors) == ("start", 0, ("0.weight",)), place
    assert again.about["permuted"] == 1
    for step in steps["steps"]:
        assert_equal(first.kind("before", step), again.kind("before", step))
        a, b = first.kind("data", step)["0"], again.kind("data", step)["0"]
        assert not np.array_equal(a, b)
        np.testing.assert_array_equal(np.sort(a.sum((1, 2, 3))), np.sort(b.sum((1, 2, 3))))
        assert_close(first.kind("raw", step), again.kind("raw", step))
        losses = [trace.kind("loss", step)["0"] for trace in (first, again)]
        np.testing.assert_allclose(*losses, rtol=1e-6)
    random = recorded("random", network(0.3))
    model = network(0.3)
    torch.manual_seed(1)
    assert_equal(random.arrays, recorded("again", model, replay="random.npz").arrays)


def case_other_optimizer():
    """State is replayed where both optimizers have it; what the file lacks is kept."""
    first = recorded("adam", optimizer=lambda model: torch.optim.Adam(model.parameters(), 0.01))
    first = first.kind("before", 2)
    given = {"replay": "adam.npz"}
    found = recorded("amsgrad", optimizer=lambda model: adamw(model, amsgrad=True), **given)
    found = found.kind("before", 2)
    assert "0.weight/max_exp_avg_sq" in found
    assert_equal(first, {name: array for name, array in found.items() if name in first})
    other = recorded("momentum", optimizer=momentum, **given).kind("before", 2)
    assert "0.weight/momentum_buffer" in other
    np.testing.assert_array_equal(other["0.weight"], first["0.weight"])


def case_replay_in_evaluation():
    """Where nothing can be loaded, the training continues, and a warning says so."""
    model = network()
    model.eval()
    told = warnings_of(recorded, "evaluation", model, steps=1, replay="first.npz")
    text = "evaluation.npz: replay: step 0: the model is called in evaluation mode"
    assert [each for each in told if each.startswith(text)], told
    assert Trace("evaluation").replaced


def resumed(path, forgets, **options):
    """Trains two steps, and then two more with what a checkpoint has kept; records the latter."""
    model = network()
    optimizer = adamw(model)
    train(model, optimizer, None, plain, 2)
    if forgets:
        optimizer.state.clear()
    later = {"first_step": 2, "replay": "whole.npz", **options}
    train(model, optimizer, path, two_steps_later, 2, **later)
    return Trace(path.removesuffix(".npz"))


def two_steps_later(model, optimizer, step):
    plain(model, optimizer, step + 2)


def case_first_step():
    """A resumed job counts as the reference does; state that it has lost is another start."""
    recorded("whole", steps_of=plain, steps=4)
    assert resumed("resumed.npz", False, steps=[3]).about["asked"] == [3]
    assert resumed("resumed.npz", False, steps=2).about["steps"] == [2, 3]
    assert compare("whole.npz", "resumed.npz").ok
    resumed("forgotten.npz", True, steps=2)
    verdict = compare("whole.npz", "forgotten.npz")
    assert (node_of(verdict), verdict.place.step) == ("start", 2), str(verdict)


KERAS_VARIABLES = {
    "conv/kernel": ("weight", "HWIO", (2, 2, 1, 4)), "conv/bias": ("weight", "", (4,)),
    "bn/gamma": ("weight", "", (4,)), "bn/beta": ("weight", "", (4,)),
    "dense/kernel": ("weight", "IO", (64, 5)), "dense/bias": ("weight", "", (5,)),
    "bn/moving_mean": ("statistic", "", (4,)), "bn/moving_variance": ("statistic", "", (4,)),
}  # fmt: skip


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
    np.savez("keras.npz", about=np.array(json.dumps(about)), **members)
    given = {"num_steps": 1, "steps": 1, "replay": "keras.npz"}
    names = {"0.weight": "conv/kernel", "4.weight": "dense/kernel"}
    for each in ({}, names):
        before = recorded("port", names=each, **given).kind("before")
        np.testing.assert_array_equal(before["0.weight"], arrays[0].transpose(3, 2, 0, 1))
        np.testing.assert_array_equal(before["4.weight"], arrays[4].T)
        of_norm = {"weight": 2, "bias": 3, "running_mean": 6, "running_var": 7}
        for leaf, index in of_norm.items():
            np.testing.assert_array_equal(before[f"1.{leaf}"], arrays[index])
    swapped = {"1.weight": "bn/beta", "1.bias": "bn/gamma"}
    swapped = recorded("swapped", names=swapped, **given).kind("before")
    for own, other in {"1.weight": "1.bias", "1.bias": "1.weight", "0.bias": "0.bias"}.items():
        np.testing.assert_array_equal(before[own], swapped[other])


class Tied(nn.Module):
    """Has two parts that may share their weights."""

    def __init__(self, is_tied, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        if not is_tied:
            self.second.weight = nn.Parameter(scale * self.first.weight.detach())

    def forward(self, x):
        return self.second(self.first(x))


def case_tied():
    """A copy of a weight that the other model ties has the recorded values of that weight."""
    of_sum("tied", Tied(True), torch.ones(4, 5), 2)
    of_sum("untied", Tied(False), torch.ones(4, 5), 2, replay="tied.npz")
    found = Trace("untied")
    before = found.kind("before", 1)
    np.testing.assert_array_equal(before["second.weight"], before["first.weight"])
    assert Trace("tied").about["tied"] == [["first.weight", "second.weight"]]
    assert found.about["tied"] == []
    of_sum("new", Tied(False, 2.0), torch.ones(4, 5), 2, replay="tied.npz")
    before = Trace("new").kind("before", 1)
    np.testing.assert_array_equal(before["second.weight"], before["first.weight"])
    assert compare("tied.npz", "new.npz").name == "other_tying"
    of_sum("tied_again", Tied(True), torch.ones(4, 5), 2, replay="tied.npz")
    assert compare("tied.npz", "tied_again.npz").ok
    for paths in (("tied.npz", "untied.npz"), ("untied.npz", "tied.npz")):
        verdict = compare(*paths)
        assert (node_of(verdict), verdict.name) == ("start", "other_tying"), str(verdict)


class Counting(torch.optim.SGD):
    """Keeps a number, and the first rows of a momentum."""

    rows = 4

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state, rows = self.state[p], self.rows
                if not state:
                    state["number"], state["own"] = 0, torch.zeros_like(p)[:rows]
                assert len(state["own"]) == rows
                state["number"] += 1
                state["own"] += p.grad[:rows]
                p -= group["lr"] * p.grad


def case_state_that_does_not_fit():
    """What does not fit is not loaded, and a warning says so; the training continues."""
    for name, rows in (("four", 4), ("three", 3)):

        def optimizer(model, rows=rows):
            created = Counting(model.parameters(), 0.1)
            created.rows = rows
            return created

        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
        steps_of = functools.partial(sum_of_outputs, x)
        options = {"replay": "four.npz"} if name != "four" else {}
        told = warnings_of(recorded, name, nn.Linear(64, 4), optimizer, steps_of, 3, **options)
        told = [text for text in told if "not loaded" in text]
        trace = Trace(name)
        before = trace.kind("before", 2)
        assert before["weight/number"] == 2 and len(told) == (rows < 4), told
        assert trace.about["not_loaded"] == ["weight/own", "bias/own"] * (rows < 4)
    start = "three.npz: step 1: not loaded from four.npz: weight/own, bias/own: not in it, of"
    assert told[0].startswith(start), told
    assert told[0].endswith("; if it is a part, pass mesh= and dims={'weight/own': 'd0[tp] d1'}")


# --- The examples, and the shards, of the other recording --------------------------------------


def of_two(name, dropout):
    """Records two trainings as the ranks of one."""
    for rank in range(2):
        model = network(dropout)
        torch.manual_seed(rank)
        steps_of = functools.partial(plain, shard=(rank, 2), limit=0.5)
        trace = recorded("part", model, momentum, steps_of, steps=1)
        arrays = {key.replace("/0/", f"/{rank}/"): x for key, x in trace.arrays.items()}
        about = trace.about | {"num_replicas": 2, "replicas": [rank], "reduction": "mean"}
        about["aliases"] = {}  # All arrays have their names.
        np.savez(f"{name}.rank{rank}.npz", about=np.array(json.dumps(about)), **arrays)
    return Trace(name)


def case_modules_of_shards():
    """The outputs of a module are in the order of the batch, as those of the model."""
    of_two("shards", 0.0)
    options = {"steps": 1, "replay": "shards.npz", "shards": "each", "modules": True}
    one = recorded("by_shard", optimizer=momentum, **options).arrays
    np.testing.assert_array_equal(one["1/module_out/0/4"], one["1/y_pred/0/0"])


def of_output(model, optimizer, step):
    """Trains a model that returns its loss."""
    model(batch(step)[0]).sum().backward()
    optimizer.step()


def case_shards():
    """One process computes each replica's part of the batch, with its random numbers."""
    options = {"steps": 1, "replay": "shards.npz", "shards": "each"}
    for dropout in (0.0, 0.3):
        two, model = of_two("shards", dropout), network(dropout)
        one = recorded("by_shard", model, momentum, **options)
        assert "forward" not in vars(model)
        np.testing.assert_array_equal(one.arrays["1/shards/0/0"], np.arange(12) % 2)
        assert_close(one.kind("raw"), mean_of_raw(two, 0))
        for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
            np.testing.assert_array_equal(one.kind("after")[name], two.kind("after")[name])
        own = [key for key in one.arrays if key.startswith("1/own_after/1/")]
        assert len(own) == 3
        for key in own:
            other = two.arrays[key.replace("own_after", "after")]
            np.testing.assert_array_equal(one.arrays[key], other)
    permuted = recorded("permuted", None, momentum, permute=1, **options)
    assert sorted(permuted.arrays["1/shards/0/0"]) == [0] * 6 + [1] * 6
    compiled = torch.compile(network(), backend="eager")
    assert "1/shards/0/0" in recorded("compiled", compiled, momentum, **options).arrays
    half = functools.partial(plain, shard=(0, 2))
    told = warnings_of(recorded, "half", None, momentum, half, **options)
    assert "1/shards/0/0" not in Trace("half").arrays
    assert (
        "half.npz: step 0 has other examples than shards.npz; not computed for each shard" in told
    )
    whole = network()
    forward = whole.forward
    whole.forward = lambda x: forward(x).mean()
    one = recorded("mean", whole, momentum, of_output, **options)
    assert "1/shards/0/0" in one.arrays
    whole.forward = lambda x: forward(x).sum()
    expected = "shards='each': the model has an output which is no mean over examples"
    refused(expected, recorded, "output", whole, momentum, of_output, **options)
    whole.forward = lambda x: forward(x).sum(0)
    expected = "shards='each': the model has an output of shape (5,), without a row"
    refused(expected, recorded, "output", whole, momentum, of_output, **options)
