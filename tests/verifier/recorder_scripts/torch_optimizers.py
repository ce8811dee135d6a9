"""Cases of PyTorch: rules of optimizers, several optimizers and models, averages of weights."""
# ruff: noqa: F403, F405 (the names of `torch_training`)

import numpy as np
import torch
from torch import nn

from lockstep import compare
from lockstep.oracles.rules import rule_of, updated
from recording import Trace
from torch_training import *


class Several:
    """Optimizers that the script calls one after another."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def zero_grad(self):
        for each in self.optimizers:
            each.zero_grad()

    def step(self):
        for each in self.optimizers:
            each.step()


def of_both(model):
    """Returns an optimizer for each half."""
    first = torch.optim.SGD(model.first.parameters(), 0.1, momentum=0.9)
    return first, torch.optim.AdamW(model.second.parameters(), 0.01)


def case_two_optimizers():
    """Both are seen, also those that are not passed; each weight has the rule of its own."""

    def train_halves(path, given=lambda both: None, **options):
        model = Halves()
        both = of_both(model)
        return train(model, Several(*both), path, plain, 3, given=given(both), **options)

    bits, expected = train_halves(None), None
    for given in (lambda both: None, list, lambda both: both[0], lambda both: both[1]):
        assert is_equal(bits, train_halves("halves.npz", given, steps=[0, 2]))
        trace = Trace("halves")
        expected = expected or trace
        assert_equal(trace.arrays, expected.arrays)
        assert trace.about["settings"] == expected.about["settings"]
    groups = [(group["optimizer"], group["weights"]) for group in trace.about["settings"][0]]
    assert groups == [
        ("SGD", ["first.weight", "first.bias"]), ("AdamW", ["second.weight", "second.bias"]),
    ]  # fmt: skip
    before, after = trace.kind("before"), trace.kind("after")
    assert {"first.bias/momentum_buffer", "second.bias/exp_avg"} <= after.keys()
    assert all(not np.array_equal(before[name], after[name]) for name in trace.about["gradients"])


def in_bfloat16(array):
    return torch.tensor(array).bfloat16().double().numpy()


def case_muon():
    """What it computes is its rule, with either scale of its learning rate."""
    for scale in ("original", "match_rms_adamw"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4, bias=False), nn.Linear(4, 5, False))
        optimizer = torch.optim.Muon(model.parameters(), 0.02, 1.0, adjust_lr_fn=scale)
        train(model, optimizer, "muon.npz", plain, 3)
        trace = Trace("muon")
        (group,) = trace.about["settings"][2]
        rule = rule_of(trace.about["optimizer"], group)
        assert (rule.family, rule.learning_rate, rule.rate_of_shape) == ("Muon", 0.02, scale)
        before, gradients, after = (trace.kind(kind, 2) for kind in ("before", "clipped", "after"))
        for name in trace.about["gradients"]:
            slot = f"{name}/momentum_buffer"
            found = updated(
                rule, before[name], gradients[name], {"velocity": before[slot]}, near=in_bfloat16
            )
            np.testing.assert_allclose(found["velocity"], after[slot], rtol=1e-5, atol=1e-9)
            moved = np.linalg.norm(after[name] - before[name])
            # In bfloat16 the error is up to 0.024.
            assert np.linalg.norm(found["weight"] - after[name]) < 0.05 * moved


def train_in_backward(path, **options):
    """Trains with an optimizer for each weight, which steps in a hook of the backward pass."""
    model = Halves()
    optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

    def hook(p):
        optimizers[p].step()
        p.grad = None

    def steps_of(model, _, step):
        loss_of(model, step).backward()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(hook)
    return train(model, None, path, steps_of, 3, steps=2, **options)


def case_optimizers_in_backward():
    """The update of each weight is part of the step; gradients are those before the hook."""
    assert is_equal(train_in_backward(None), train_in_backward("in_backward.npz"))
    trace = Trace("in_backward")
    assert trace.about["steps"] == [0, 1] and trace.about["micro_batches"] == [1, 1]
    assert trace.kind("raw").keys() == trace.kind("clipped").keys() == {*trace.about["gradients"]}
    assert "second.bias/momentum_buffer" in trace.kind("after") and "0" in trace.kind("loss")
    # It is the same training as with one optimizer after the backward pass.
    model = Halves()
    train(model, momentum(model), "after.npz", plain, 3, steps=2)
    train_in_backward("again.npz", replay="after.npz")
    assert compare("after.npz", "again.npz").ok
