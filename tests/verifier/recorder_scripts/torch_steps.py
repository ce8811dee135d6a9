"""Cases of PyTorch: what belongs to a step, however the script calls the model and updates it."""
# ruff: noqa: F403, F405 (the names of `torch_training`)

import functools

import numpy as np
import torch
import torch.nn.functional as F

from lockstep import compare
from lockstep.data import file as trace_file
from lockstep.recorders.torch import modules
from recording import Trace
from torch_training import *


def case_repeated_update():
    """A second update with the same gradients belongs to the same step."""

    def steps_of(model, optimizer, step):
        plain(model, optimizer, step)
        optimizer.step()

    twice = recorded("twice", None, adamw, steps_of, 3, steps=[0, 2])
    assert twice.about["steps"] == [0, 2]
    counts = [twice.kind(kind, 2)["0.weight/step"] for kind in ("before", "after")]
    assert counts == [4, 6]


def train_passes(way, model, optimizer, step):
    """Trains on three batches; autograd adds up their gradients, or the script does."""
    optimizer.zero_grad(set_to_none=way != "zeros")
    sums = [0, 0, 0, 0]
    for number in range(3):
        x, y = batch(number)
        outputs = model.second(model.first(x.flatten(1))) if way == "parts" else model(x)
        loss = F.mse_loss(outputs, y)
        if way == "engine":
            own = torch.autograd.grad(loss, [*model.parameters()])
            sums = [a + b for a, b in zip(sums, own, strict=True)]
            continue
        loss.backward()
        if way == "cleared" and not number:
            for weight in model.parameters():
                weight.grad.zero_()
    if way == "engine":
        for weight, own in zip(model.parameters(), sums, strict=True):
            weight.grad = own
    optimizer.step()


def case_backward_passes():
    """What autograd computes in each pass of a step that has several, also if an engine adds it."""
    one = recorded("one", Halves(), adamw, plain, 1, steps=1)
    assert not trace_file.load("one.npz").backward_passes(0, 0)
    found = {}
    for way in ("plain", "zeros", "cleared", "engine", "parts"):
        trace = recorded(way, Halves(), adamw, functools.partial(train_passes, way), 2, steps=2)
        assert trace.about["steps"] == [0, 1]
        assert way != "plain" or trace.about["micro_batches"] == [3, 3]
        found[way] = trace_file.load(f"{way}.npz")
    first = found["plain"].backward_passes(0, 0)
    assert_equal(first[0], one.kind("raw"))
    for name, total in found["plain"].named(0, "clipped", 0).items():
        assert np.array_equal(first[0][name] + first[1][name] + first[2][name], total)
    for way in ("zeros", "cleared", "engine", "parts"):
        for own, other in zip(first, found[way].backward_passes(0, 0), strict=True):
            assert_equal(own, other)
    assert found["engine"].named(0, "raw", 0) is None


def with_closure(model, optimizer, step):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    optimizer.step(closure)


def case_changes_in_hooks_after_the_update():
    """They belong to the step."""

    def steps_of(model, optimizer, step):
        if step == 0:
            optimizer.register_step_post_hook(lambda *_: model.first.weight.data.clamp_(-0.1, 0.1))
        plain(model, optimizer, step)

    trace = recorded("clamped", Halves(), adamw, steps_of, 2, steps=2)
    for step in (0, 1):
        after = trace.kind("after", step)["first.weight"]
        assert np.abs(after).max() == np.float32(0.1) and not trace.kind("left", step)


def case_closures():
    """One call in a step is recorded as usual; with several, as of LBFGS, the step is left out."""
    plain_one = recorded("plain", steps_of=plain, num_steps=3)
    assert_equal(plain_one.arrays, recorded("closure", None, adamw, with_closure, 3).arrays)
    bits = []
    for path in (None, "lbfgs.npz"):
        model = network()
        optimizer = torch.optim.LBFGS(model.parameters(), 0.01, max_iter=2)
        given = model, optimizer, path, with_closure
        told = warnings_of(lambda *given: bits.append(train(*given)), *given)
    assert is_equal(*bits)
    assert ["calls its closure several times" in text for text in told] == [True]
    refused("lbfgs.npz: has no steps", compare, "lbfgs.npz", "lbfgs.npz")


def of_modules(path, change=lambda layer: None, **options):
    """Trains a network with a layer that changes its input in place; returns the final bits."""
    torch.manual_seed(0)
    hidden = nn.Linear(64, 8)
    change(hidden)
    model = nn.Sequential(nn.Flatten(), hidden, nn.ReLU(inplace=True), nn.Linear(8, 5))
    return train(model, adamw(model), path, plain, 3, **options)


def permute(layer):
    right = layer.forward
    layer.forward = lambda x: right(x).roll(1, -1)


def case_modules():
    """To record them changes no bit; the first wrong one is named."""
    bits = of_modules(None)
    for pattern, names in ((True, ["0", "1", "2", "3"]), ("3", ["3"])):
        assert is_equal(bits, of_modules("one.npz", modules=pattern))
        assert Trace("one").about["modules"] == names
    of_modules("one.npz", modules=True)
    of_modules("wrong.npz", permute, modules=True, replay="one.npz")
    assert compare("one.npz", "wrong.npz").place.module == "1, forward"


def case_modules_beyond_a_limit():
    """All modules together are left out beyond a limit; those of a pattern are not."""
    modules.MOST_BYTES = 2000
    for name, pattern, has_arrays in (("all", True, False), ("some", "4", True)):
        told = warnings_of(recorded, name, network(), modules=pattern, num_steps=2, steps=2)
        trace = Trace(name)
        assert any("/module_" in key for key in trace.arrays) == has_arrays
        said = ["are not recorded; pass a pattern" in text for text in told]
        assert said == ([] if has_arrays else [True])
        assert trace.about["steps"] == [0, 1]
