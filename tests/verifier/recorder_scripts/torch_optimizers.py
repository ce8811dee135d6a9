"""Cases of PyTorch: several optimizers and models, and averages of weights."""
# ruff: noqa: F403, F405 (the names of `torch_training`)

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import compare, record_torch
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


def of_both(model, rate=0.01):
    """Returns an optimizer for each half."""
    first = torch.optim.SGD(model.first.parameters(), 0.1, momentum=0.9)
    return first, torch.optim.AdamW(model.second.parameters(), rate)


def train_halves(path, rate=0.01, given=lambda both: None, **options):
    model = Halves()
    both = of_both(model, rate)
    return train(model, Several(*both), path, plain, 3, given=given(both), **options)


def check_rates(train_one):
    """Checks that the same training is clean, and one with another learning rate is not."""
    train_one("one.npz")
    train_one("same.npz", replay="one.npz")
    assert compare("one.npz", "same.npz").ok
    train_one("wrong.npz", rate=0.02, replay="one.npz")
    assert node_of(compare("one.npz", "wrong.npz")) == "update"


def case_two_optimizers():
    """Both are seen, also those that are not passed; each weight has the rule of its own."""
    bits, expected = train_halves(None), None
    for given in (lambda both: None, list, lambda both: both[0], lambda both: both[1]):
        assert is_equal(bits, train_halves("halves.npz", given=given, steps=[0, 2]))
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
    check_rates(train_halves)


def case_two_rates():
    """Settings tell twice the learning rate from two updates."""
    train_halves("one.npz")
    train_halves("wrong.npz", rate=0.02)
    verdict = compare("one.npz", "wrong.npz")
    assert verdict.name == "other_learning_rate", str(verdict)


def case_rmsprop():
    """Its update is compared, with and without momentum, and also centered."""
    for options in ({}, {"momentum": 0.9, "weight_decay": 0.1}, {"centered": True}):

        def train_one(path, rate=0.01, options=options, **given):
            model = Halves()
            optimizer = torch.optim.RMSprop(model.parameters(), rate, **options)
            return train(model, optimizer, path, plain, 3, **given)

        check_rates(train_one)


def case_ambiguous_optimizers():
    """Two optimizers have state of a weight: the script must say which one trains."""
    model = Halves()
    optimizers = [momentum(model), momentum(model)]
    for optimizer in optimizers:
        plain(model, optimizer, 0)
    text = "optimizer: 2 optimizers have state of first.weight; pass those that train the model"
    refused(text, record_torch.record, "x.npz", model)
    record_torch.record("x.npz", model, optimizers[1])


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

        def train_one(path, rate=0.01, steps_of=steps_of, **options):
            model = Halves()
            both = of_both(model, rate)
            return train(model, both, path, steps_of, given=None, steps=4, **options)

        assert is_equal(train_one(None), train_one("turns.npz"))
        about = Trace("turns").about
        kinds = [[group["optimizer"] for group in each] for each in about["settings"]]
        assert about["steps"] == [0, 1, 2, 3] and kinds == expected
        check_rates(train_one)


def train_in_backward(path, every=1, **options):
    """Trains with an optimizer for each weight, which steps in a hook of the backward pass."""
    model = Halves()
    optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

    def hook(p):
        p.grad *= every
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
    train_in_backward("wrong.npz", every=2, replay="after.npz")
    assert not compare("after.npz", "wrong.npz").ok


def train_with_average(path, keep=0.9, is_mapping=True, **options):
    """Trains, and averages the weights after each update, in a mapping or in a model."""
    model, other = Halves(), Halves()
    mapping = {name: p.detach().clone() for name, p in model.named_parameters()}

    def steps_of(model, optimizer, step):
        plain(model, optimizer, step)
        with torch.no_grad():
            for name, p in model.named_parameters():
                mapping[name] = keep * mapping[name] + (1 - keep) * p.detach()
                own = other.get_parameter(name)
                own.copy_(keep * own + (1 - keep) * p)

    average = {"ema": mapping if is_mapping else other}
    train(model, momentum(model), path, steps_of, 3, others=average, **options)


def case_averages_of_weights():
    """An average belongs to the training: to each step, also to the last one."""
    for is_mapping in (True, False):
        train_with_average("average.npz", is_mapping=is_mapping)
        trace = Trace("average")
        before, after = (trace.kind(kind, 2)["ema.first.bias"] for kind in ("before", "after"))
        expected = 0.9 * before + 0.1 * trace.kind("after", 2)["first.bias"]
        np.testing.assert_allclose(after, expected, rtol=1e-6)
        options = {"is_mapping": is_mapping, "replay": "average.npz"}
        train_with_average("again.npz", **options)
        assert compare("average.npz", "again.npz").ok
        train_with_average("wrong.npz", keep=0.8, **options)
        verdict = compare("average.npz", "wrong.npz")
        assert node_of(verdict) == "update", str(verdict)
        assert all(name.startswith("ema.") for name in verdict.place.tensors), verdict.place


def train_adversaries(path, order=None, rate=0.01, turns=0, **options):
    """Updates a critic, then a generator, whose backward pass also adds to the critic's gradients.

    Args:
        path: of the recording.
        order: of the examples; another one moves the last bits.
        rate: learning rate of the critic.
        turns: of the critic for each of the generator, of both optimizers and models; 0 for one
            turn, of what has both models and one of the optimizers.
    """
    torch.manual_seed(0)
    made, critic = nn.Linear(5, 8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    of_critic = torch.optim.Adam(critic.parameters(), rate)
    of_made = torch.optim.Adam(made.parameters(), 0.01)
    both = nn.ModuleDict({"made": made, "critics": nn.ModuleList([critic])})
    models, given = ([made, critic], (of_made, of_critic)) if turns else (both, of_critic)
    order = torch.arange(40) if order is None else order
    x, z = torch.randn(10, 40, 8)[:, order], torch.randn(10, 40, 5)[:, order]

    with record_torch.record(path, models, given, **{"steps": 10 if turns else 20, **options}):
        for step in range(10):
            made_ones = made(z[step])
            for _ in range(turns or 1):
                of_critic.zero_grad()
                outputs = critic(x[step]), critic(made_ones.detach())
                (F.softplus(-outputs[0]).mean() + F.softplus(outputs[1]).mean()).backward()
                of_critic.step()
            of_made.zero_grad()
            F.softplus(-critic(made_ones if turns else made(z[step]))).mean().backward()
            of_made.step()
    return [x.clone() for x in both.state_dict().values()]


def case_several_models():
    """A step has an update of each optimizer, and begins before the first model is called."""
    assert is_equal(train_adversaries(None, turns=1), train_adversaries("rounds.npz", turns=1))
    trace = Trace("rounds")
    assert trace.about["steps"] == [*range(10)] and trace.about["micro_batches"] == [4] * 10
    assert {name[0] for name in trace.kind("clipped", 3)} == {"0", "1"}
    check_rates(functools.partial(train_adversaries, turns=1))
    # One optimizer that updates twice before the other: each update is a step, once this is seen.
    for path, options in (("turns.npz", {}), ("again.npz", {"replay": "turns.npz"})):
        train_adversaries(path, turns=2, steps=[0, *range(2, 9)], **options)
    found = [{name[0] for name in Trace("turns").kind("clipped", step)} for step in (0, 2, 3)]
    assert found == [{"1"}, {"0"}, {"1"}] and compare("turns.npz", "again.npz").ok


def case_two_parts_in_turns():
    """Each step begins at the first call of a part, and has the weights that its optimizer has."""
    train_adversaries("adversaries.npz")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    train_adversaries("same.npz", order, replay="adversaries.npz")
    one, same = Trace("adversaries"), Trace("same")
    assert one.about["steps"] == same.about["steps"] == [*range(20)]
    ends = [[trace.kind("after", step) for step in range(20)] for trace in (one, same)]
    pairs = zip(*ends, strict=True)
    assert any(not np.array_equal(a[name], b[name]) for a, b in pairs for name in a)
    for step in range(20):
        assert_equal(one.kind("before", step), same.kind("before", step))
        found = {name.split(".")[0] for name in one.kind("clipped", step)}
        assert found == {"made" if step % 2 else "critics"}, (step, found)
    check_rates(train_adversaries)
