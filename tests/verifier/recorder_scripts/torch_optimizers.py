"""Cases of PyTorch: rules of optimizers, several optimizers and models, averages of weights."""
# ruff: noqa: F403, F405 (the names of `torch_training`)

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import compare, record_torch
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


def train_with_muon(name, adjust_lr_fn, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4, bias=False), nn.Linear(4, 5, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), 0.02, 1.0, adjust_lr_fn=adjust_lr_fn)

    def steps_of(model, optimizer, step):
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x.flatten(1)), y).backward()
        optimizer.step()

    train(model, optimizer, f"{name}.npz", steps_of, 3, **options)
    return Trace(name)


def case_muon():
    """What it computes is its rule; another scale of its learning rate is another update."""
    for scale, other in (("original", "match_rms_adamw"), ("match_rms_adamw", "original")):
        trace = train_with_muon("muon", scale)
        (group,) = trace.about["settings"][2]
        rule = rule_of(trace.about["optimizer"], group)
        assert (rule.family, rule.learning_rate, rule.rate_of_shape) == ("Muon", 0.02, scale)
        before, gradients, after = (trace.kind(kind, 2) for kind in ("before", "clipped", "after"))
        for name in ("0.weight", "1.weight"):
            slot = f"{name}/momentum_buffer"
            state, moved = {"velocity": before[slot]}, after[name] - before[name]
            for changes in ({}, {"nesterov": False}, {"ns_steps": 4}, {"weight_decay": 0.1}):
                own = dataclasses.replace(rule, **changes)
                found = updated(own, before[name], gradients[name], state, near=in_bfloat16)
                np.testing.assert_allclose(found["velocity"], after[slot], rtol=1e-5, atol=1e-9)
                error = np.linalg.norm(found["weight"] - after[name]) / np.linalg.norm(moved)
                assert (error < 0.05) == (not changes), (changes, error)  # bfloat16: up to 0.024.
        train_with_muon("same", scale, replay="muon.npz")
        assert compare("muon.npz", "same.npz").ok
        train_with_muon("other", other, replay="muon.npz")
        verdict = compare("muon.npz", "other.npz")
        assert (node_of(verdict), verdict.place.step) == ("update", 0), str(verdict)


def case_nested():
    """Two recordings at once."""
    models = [nn.Linear(5, 5), nn.Linear(5, 5)]
    optimizers, original = [*map(momentum, models)], torch.autograd.backward
    first, second = (
        record_torch.record(f"nested{i}.npz", models[i], optimizers[i], steps=[i]) for i in range(2)
    )
    with first, second:
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.ones(2, 5)).sum().backward()
                optimizer.step()
    assert torch.autograd.backward is original
    assert [Trace(f"nested{i}").about["steps"] for i in (0, 1)] == [[0], [1]]


def in_turns(model, both, step):
    """Updates one half after each forward pass."""
    number = step % 2
    update_part(model, both, number, loss_of(model, step))


def in_one_pass(model, both, step):
    """Updates both halves, one after the other, after one forward pass."""
    loss = loss_of(model, step)
    for number in (0, 1):
        update_part(model, both, number, loss)


def update_part(model, both, number, loss):
    for p in model.parameters():
        p.grad = None
    inputs = [*(model.first, model.second)[number].parameters()]
    torch.autograd.backward(loss, inputs=inputs, retain_graph=True)
    both[number].step()


def case_optimizers_in_turns():
    """As of a generator and a discriminator."""
    for steps_of, expected in (
        (in_turns, [["SGD"], ["AdamW"]] * 2), (in_one_pass, [["SGD", "AdamW"]] * 4),
    ):  # fmt: skip
        bits = []
        for path in (None, "turns.npz"):
            model = Halves()
            bits.append(train(model, of_both(model), path, steps_of, given=None, steps=4))
        assert is_equal(*bits)
        about = Trace("turns").about
        kinds = [[group["optimizer"] for group in each] for each in about["settings"]]
        assert about["steps"] == [0, 1, 2, 3] and kinds == expected


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


def train_adversaries(path, turns, **options):
    """Updates a critic a number of times, then a generator."""
    torch.manual_seed(0)
    made, critic = nn.Linear(5, 8), nn.Linear(8, 1)
    models = nn.ModuleDict({"made": made, "critics": nn.ModuleList([critic])})
    optimizers = [torch.optim.Adam(each.parameters(), 0.01) for each in (made, critic)]
    x, z = torch.randn(6, 4, 8), torch.randn(6, 4, 5)
    with record_torch.record(path, models, optimizers, **options):
        for step in range(6):
            made_ones = made(z[step])
            for _ in range(turns):
                optimizers[1].zero_grad()
                outputs = critic(x[step]), critic(made_ones.detach())
                (F.softplus(-outputs[0]).mean() + F.softplus(outputs[1]).mean()).backward()
                optimizers[1].step()
            optimizers[0].zero_grad()
            F.softplus(-critic(made_ones)).mean().backward()
            optimizers[0].step()
    return [*models.parameters()]


def case_several_models():
    """A step has an update of each optimizer; if one updates twice before, each update is one."""
    for turns, steps in ((1, [0, 1, 2]), (2, [0, 2, 3])):
        bits = train_adversaries("turns.npz", turns, steps=3)
        assert is_equal(bits, train_adversaries(None, turns))
        trace = Trace("turns")
        assert trace.about["steps"] == trace.about["asked"] == steps
        parts = [{name.partition(".")[0] for name in trace.kind("clipped", s)} for s in steps]
        both = {"made", "critics"}
        assert parts == ([both] * 3 if turns == 1 else [{"critics"}, {"made"}, {"critics"}])
    train_adversaries("one.npz", 2, steps=1)
    assert Trace("one").about["not_updated"] == ["made.weight", "made.bias"]
    assert compare("one.npz", "one.npz").status == "not verified"
