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
        "renamed": {"replay": "first.npz"}, "permuted": {"replay": "first.npz", "permute": 1},
    }.items():  # fmt: skip
        model = network()
        nn.init.ones_(model[0].weight)
        model = nn.Sequential(model) if name == "renamed" else model  # Matched by shape and order.
        again = recorded(name, model, **options, **steps)
        assert again.about["replayed"] == options["replay"]
        if name != "permuted":
            assert_equal(first.arrays, again.arrays)
            assert again.replaced["1/replaced/0/0"].min() == 1  # What the script starts from.
            later = {name for name in again.replaced if name.startswith("2/replaced/")}
            assert {*again.about["aliases"]} >= later
    # The weights that replay= has replaced are another start.
    place = compare("first.npz", "again.npz").place
    assert (place.node, place.step, place.tensors) == ("start", 0, ("0.weight",)), place
    assert again.about["permuted"] == 1
    for step in steps["steps"]:
        assert_equal(first.kind("before", step), again.kind("before", step))
        a, b = first.kind("data", step)["0"], again.kind("data", step)["0"]
        assert not np.array_equal(a, b)
        np.testing.assert_array_equal(np.sort(a.sum((1, 2, 3))), np.sort(b.sum((1, 2, 3))))
        for kind in ("raw", "loss"):
            assert_close(first.kind(kind, step), again.kind(kind, step))
    random = recorded("random", network(0.3))
    model = network(0.3)
    torch.manual_seed(1)
    assert_equal(random.arrays, recorded("again", model, replay="random.npz").arrays)


def case_replay_in_evaluation():
    """Where nothing can be loaded, the training continues, and a warning says so."""
    recorded("first")
    model = network()
    model.eval()
    told = warnings_of(recorded, "evaluation", model, steps=1, replay="first.npz")
    text = "evaluation.npz: replay: step 0: no forward pass in training mode"
    assert [each for each in told if each.startswith(text)], told
    assert Trace("evaluation").replaced


def case_other_optimizer():
    """State is replayed where both optimizers have it; what the file lacks is kept."""
    first = recorded("adam", optimizer=lambda model: torch.optim.Adam(model.parameters(), 0.01))
    first, given = first.kind("before", 2), {"replay": "adam.npz"}
    found = recorded("amsgrad", optimizer=lambda model: adamw(model, amsgrad=True), **given)
    found = found.kind("before", 2)
    assert "0.weight/max_exp_avg_sq" in found
    assert_equal(first, {name: array for name, array in found.items() if name in first})
    other = recorded("momentum", optimizer=momentum, **given).kind("before", 2)
    assert "0.weight/momentum_buffer" in other
    np.testing.assert_array_equal(other["0.weight"], first["0.weight"])


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


BY_SHARD = {"steps": 1, "replay": "shards.npz", "shards": "each"}


def of_output(model, optimizer, step):
    """Trains a model that returns its loss."""
    model(batch(step)[0]).backward()
    optimizer.step()


def of_two_outputs(model, optimizer, step):
    """Trains a model by two outputs."""
    sum(model(batch(step)[0])).sum().backward()
    optimizer.step()


def case_shards():
    """One process computes each replica's part of the batch, with its random numbers."""
    for dropout in (0.0, 0.3):
        two, model = of_two("shards", dropout), network(dropout)
        # The outputs of a module are in the order of the batch, as those of the model.
        one = recorded("by_shard", model, momentum, modules=True, **BY_SHARD)
        outputs = [one.arrays[f"1/{kind}"] for kind in ("module_out/0/4", "y_pred/0/0")]
        np.testing.assert_array_equal(*outputs)
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
    compiled = torch.compile(network(), backend="eager")
    assert "1/shards/0/0" in recorded("compiled", compiled, momentum, **BY_SHARD).arrays
    half = functools.partial(plain, shard=(0, 2))
    told = warnings_of(recorded, "half", None, momentum, half, **BY_SHARD)
    assert "1/shards/0/0" not in Trace("half").arrays
    assert any("other examples than shards.npz" in text for text in told)
    model = network()
    forward = model.forward
    model.forward = lambda x: ((inner := forward(x)), 2 * inner)
    arrays = recorded("two", model, momentum, of_two_outputs, **BY_SHARD).arrays
    assert np.all(arrays["1/y_grad/0/0"] == 3) and np.all(arrays["1/y_grad/0/1"] == 1)
    model.forward = lambda x: forward(x).sum()
    expected = "shards='each': the model has an output which is no mean over examples"
    refused(expected, recorded, "output", model, momentum, of_output, **BY_SHARD)
