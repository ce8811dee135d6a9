"""Cases of PyTorch: what is loaded from another recording."""
# ruff: noqa: F403, F405 (the names of `torch_training`)

import functools
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
    for name in ("plain", "ranks", "renamed"):
        replay = "ranks.npz" if name == "ranks" else "first.npz"
        model = network()
        nn.init.ones_(model[0].weight)
        model = nn.Sequential(model) if name == "renamed" else model  # Matched by shape and order.
        again = recorded(f"{name}_again", model, replay=replay, **steps)
        assert again.about["replayed"] == replay
        assert_equal(first.arrays, again.arrays)
        assert again.replaced["1/replaced/0/0"].min() == 1  # What the script starts from.
        later = {name for name in again.replaced if name.startswith("2/replaced/")}
        assert {*again.about["aliases"]} >= later
    # The weights that replay= has replaced are another start.
    place = compare("first.npz", "plain_again.npz").place
    assert (place.node, place.step, place.tensors) == ("start", 0, ("0.weight",)), place


def case_permuted():
    first, permuted = recorded("first"), recorded("permuted", replay="first.npz", permute=1)
    assert permuted.about["permuted"] == 1
    for step in range(3):
        assert_equal(first.kind("before", step), permuted.kind("before", step))
        a, b = first.kind("data", step)["0"], permuted.kind("data", step)["0"]
        assert not np.array_equal(a, b)
        np.testing.assert_array_equal(np.sort(a.sum((1, 2, 3))), np.sort(b.sum((1, 2, 3))))
        for kind, key in [("loss", "0"), *(("raw", key) for key in first.about["gradients"])]:
            own, other = (trace.kind(kind, step)[key] for trace in (first, permuted))
            np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6, err_msg=key)


def case_replay_of_random_numbers():
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
    text = "evaluation.npz: replay: step 0: "
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


def in_parts(model, optimizer, step):
    optimizer.zero_grad()
    for part in range(2):
        (loss_of(model, step, part, 2) / 2).backward()
    optimizer.step()


def case_shards():
    """One pass computes the parts of the other recording; of replicas, `cases/` has programs."""
    recorded("parts", None, momentum, in_parts, 1)
    given = {"steps": 1, "replay": "parts.npz", "shards": "each"}
    # The outputs of a module are in the order of the batch, as those of the model.
    one = recorded("by_part", None, momentum, plain, modules=True, **given)
    outputs = [one.arrays[f"1/{kind}"] for kind in ("module_out/0/4", "y_pred/0/0")]
    np.testing.assert_array_equal(*outputs)
    np.testing.assert_array_equal(one.arrays["1/shards/0/0"], np.arange(12) % 2)
    half = functools.partial(plain, shard=(0, 2))
    told = warnings_of(recorded, "half", None, momentum, half, **given)
    assert "1/shards/0/0" not in Trace("half").arrays
    assert any("other examples than parts.npz" in text for text in told)
    model = network()
    forward = model.forward
    model.forward = lambda x: forward(x).sum()
    of_output = functools.partial(plain, loss=lambda model, step, *_: model(batch(step)[0]))
    expected = "shards='each': the model has an output which is no mean over examples"
    refused(expected, recorded, "output", model, momentum, of_output, **given)
