"""Cases of PyTorch: what belongs to a step, however the script calls the model and updates it."""
# ruff: noqa: F403, F405 (the names of `torch_training`)

import contextlib
import functools
import pathlib
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from lockstep import compare, record_torch
from lockstep.data import file as trace_file
from lockstep.recorders.torch import modules
from recording import Trace
from torch_training import *


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
    mixed = torch.autocast("cpu", dtype=torch.float16)

    def steps_of(is_outside, model, optimizer, step):
        with mixed if is_outside else contextlib.nullcontext():
            loss = loss_of(model, step)
        loss.backward()
        with mixed, torch.no_grad():
            model(batch(step)[0])
        optimizer.step()

    for model, is_outside, dtype in (
        (network(), True, "float16"), (network(), False, ""), (Converted(), False, "float16"),
    ):  # fmt: skip
        own = functools.partial(steps_of, is_outside)
        trace = recorded("autocast", model, adamw, own, 1, steps=1)
        assert trace.about["computed_in"] == dtype


def case_modes():
    """Layers in evaluation mode are those of the training step, also if all are."""

    def steps_of(model, optimizer, step):
        off = ([], [model[3]], [model])[step]
        for layer in off:
            layer.eval()
        optimizer.zero_grad()
        loss_of(model, step).backward()
        model.eval()
        with torch.no_grad():
            model(batch(step)[0])
        model.train()
        for layer in off:
            layer.eval()
        optimizer.step()

    recorded("modes", network(0.3), adamw, steps_of, 3)
    about = trace_file.load("modes.npz").about
    assert about.in_evaluation == ((), ("3",), ("", "0", "1", "2", "3", "4"))
    assert about.micro_batches == (1, 1, 1)


def case_repeated_update():
    """A second update with the same gradients belongs to the same step."""

    def steps_of(model, optimizer, step):
        plain(model, optimizer, step)
        optimizer.step()

    for steps in ([0, 1, 2], [0, 2]):
        twice = recorded("twice", None, adamw, steps_of, 3, steps=steps)
        assert twice.about["steps"] == steps and twice.kind("after", 2)["0.weight/step"] == 6
        assert twice.kind("before", 2)["0.weight/step"] == 4


def case_skipped():
    """The update of the second batch is skipped, as a GradScaler does: the step begins again."""

    def steps_of(model, optimizer, step):
        (loss_of(model, step) * (float("inf") if step == 1 else 1)).backward()
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()

    skipped = recorded("skipped", None, adamw, steps_of, 3, steps=2)
    assert skipped.about["micro_batches"] == [1, 1] and skipped.about["steps"] == [0, 1]
    assert skipped.kind("data", 1).keys() == {"0"} and skipped.about["skipped"] == 1

    def ends_with_an_overflow(model, optimizer, step):
        optimizer.zero_grad()
        (loss_of(model, step) * (float("inf") if step == 1 else 1)).backward()
        if step != 1:
            optimizer.step()

    ended = recorded("ended", None, adamw, ends_with_an_overflow, 2, steps=2)
    assert ended.about["skipped"] == 1 and ended.about["steps"] == [0]


def case_scaled():
    """Gradients, losses and clipped norms of a GradScaler are recorded without its scale."""

    def steps_of(scaler, model, optimizer, step):
        times = 0.5 if step else float("inf")  # The first update is skipped.
        scaler.scale(loss_of(model, step) * times).backward()
        if step % 2 == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            for p in model.parameters():  # Not None, as zero_grad leaves them.
                p.grad = torch.zeros_like(p)

    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (1.0, 1024.0)]
    plain_one, scaled = (
        recorded("scaled", None, adamw, functools.partial(steps_of, scaler), 5, steps=2)
        for scaler in scalers
    )
    calls = ["forward", "backward", "forward", "backward", "unscale", "clip norm 0.5"]
    assert plain_one.about["calls"] == scaled.about["calls"] == [calls, calls]
    assert plain_one.about["loss_scale"] == [0.5, 0.5]
    assert scaled.about["loss_scale"] == [512, 512] and scaled.about["skipped"] == 1
    for kind in ("raw", "unclipped", "clipped", "loss"):
        for step in (0, 1):
            assert_close(plain_one.kind(kind, step), scaled.kind(kind, step))


def case_accumulation():
    losses = []

    def steps_of(model, optimizer, step):
        for number in range(2):
            loss = loss_of(model, number) / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()

    trace = recorded("accumulation", None, adamw, steps_of, 1, steps=1)
    assert trace.about["micro_batches"] == [2]
    assert set(trace.kind("data")) == set(trace.kind("random")) == {"0", "1"}
    assert not np.array_equal(trace.kind("data")["0"], trace.kind("data")["1"])
    assert_equal(trace.kind("raw"), trace.kind("clipped"))
    np.testing.assert_allclose(trace.kind("loss")["0"], sum(losses), rtol=1e-6)


def case_backward_passes():
    """What autograd computes in each pass of a step that has several, also if an engine adds it."""

    def steps_of(way, model, optimizer, step):
        optimizer.zero_grad(set_to_none=way != "zeros")
        weights, sums = [*model.parameters()], [0, 0, 0, 0]
        for number in range(1 if way == "one" else 3):
            loss = loss_of(model, number)
            if way == "engine":
                own = torch.autograd.grad(loss, weights)
                sums = [a + b for a, b in zip(sums, own, strict=True)]
                continue
            loss.backward()
            if way == "cleared" and not number:
                for weight in weights:
                    weight.grad.zero_()
        for weight, own in zip(weights, sums, strict=True) if way == "engine" else ():
            weight.grad = own
        optimizer.step()

    found = {}
    for way in ("one", "plain", "zeros", "cleared", "engine"):
        trace = recorded(way, Halves(), adamw, functools.partial(steps_of, way), 2, steps=2)
        assert trace.about["steps"] == [0, 1]
        found[way] = trace_file.load(f"{way}.npz")
        assert len(found[way].backward_passes(0, 0)) == (0 if way == "one" else 3)
    first = found["plain"].backward_passes(0, 0)
    assert_equal(first[0], found["one"].named(0, "raw", 0))
    for name, total in found["plain"].named(0, "clipped", 0).items():
        assert np.array_equal(first[0][name] + first[1][name] + first[2][name], total)
    for way in ("zeros", "cleared", "engine"):
        for own, other in zip(first, found[way].backward_passes(0, 0), strict=True):
            assert_equal(own, other)
    assert found["engine"].named(0, "raw", 0) is None


def case_passes_without_modules():
    """The state before a step is recorded where a script calls no module and adds up gradients."""

    def steps_of(model, optimizer, step):
        weights, sums = [*model.parameters()], [0, 0, 0, 0]
        for number in range(2):
            x, y = batch(number)
            hidden = F.linear(x.reshape(12, -1), *weights[:2])
            loss = F.mse_loss(F.linear(hidden, *weights[2:]), y)
            own = torch.autograd.grad(loss, weights)
            sums = [a + b for a, b in zip(sums, own, strict=True)]
        for weight, own in zip(weights, sums, strict=True):
            weight.grad = own
        optimizer.step()

    trace = recorded("of_parts", Halves(), adamw, steps_of, 1, steps=1)
    assert len(trace_file.load("of_parts.npz").backward_passes(0, 0)) == 2
    assert "first.weight" in trace.kind("before")


def case_parts_of_a_pass():
    """A weight that gets its gradient in parts of one call, and a script's own hooks."""
    model = Halves()
    model.first.weight.register_hook(lambda gradient: 2 * gradient)

    def steps_of(model, optimizer, step):
        optimizer.zero_grad()
        x, y = batch(step)
        hidden = checkpoint(model.first, x.reshape(12, -1).requires_grad_(), use_reentrant=True)
        again = checkpoint(model.first, x.reshape(12, -1).requires_grad_(), use_reentrant=True)
        loss = F.mse_loss(model.second(hidden), y) + again.square().mean()
        model(x)  # The recorder sees the step.
        loss.backward()
        optimizer.step()

    recorded("parts", model, adamw, steps_of, 1, steps=1)
    trace = trace_file.load("parts.npz")
    parts, total = trace.backward_passes(0, 0), trace.named(0, "raw", 0)
    assert [len(own) for own in parts] == [4, 2]
    for name in ("first.weight", "first.bias"):
        factor = 2 if name == "first.weight" else 1
        assert_close({name: factor * (parts[0][name] + parts[1][name])}, {name: total[name]})


def case_ids():
    """Ids are noted before the model is called, also of a step whose update is skipped."""

    def steps_of(model, optimizer, step):
        for number in range(2):
            record_torch.note("ids", np.arange(12) + 100 * step + 12 * number)
            loss_of(model, number).backward()
        optimizer.step()

    trace = recorded("ids", None, adamw, steps_of, 3, steps=[0, 2])
    assert trace.kind("ids")["0"].tolist() == [*range(24)]
    assert trace.kind("ids", 2)["0"].tolist() == [*range(200, 224)]


def case_two_models():
    """Trains a generator; the discriminator's loss is not part of its step."""
    other, losses = nn.Linear(5, 1), []
    other_optimizer = adamw(other)

    def steps_of(model, optimizer, step):
        made = model(torch.ones(4, 5))
        (other(made.detach()).sum() + 1000).backward()
        other_optimizer.step()
        loss = made.square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    trace = recorded("two_models", nn.Linear(5, 5), adamw, steps_of, 1, steps=1)
    np.testing.assert_allclose(trace.kind("loss")["0"], losses[0], rtol=1e-6)


def case_exception():
    """What was recorded before is written."""

    def steps_of(model, optimizer, step):
        if step == 2:
            loss_of(model, step).backward()
            raise RuntimeError("out of memory")
        plain(model, optimizer, step)

    refused("out of memory", recorded, "exception", None, adamw, steps_of, steps=3)
    about = Trace("exception").about
    assert about["steps"] == [0, 1] and about["asked"] == [0, 1, 2]
    assert about["ended_with"] == "RuntimeError: out of memory"
    assert not list(pathlib.Path().glob("*.tmp"))


# --- Closures, and optimizers in others ----------------------------------------------------------


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


def with_closure(num_calls, model, optimizer, step):
    """Trains as Lightning does: the optimizer calls the closure, which computes the gradients."""

    def closure():
        loss = model(*batch(step))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return loss

    for _ in range(num_calls - 1):
        closure()
    optimizer.step(closure)


def case_wrapped_and_called_back():
    """A wrapped optimizer, and one with a closure, are recorded as the plain one."""
    plain_one = recorded("plain")
    wrapped = recorded("wrapped", optimizer=lambda model: Wrapper(Wrapper(adamw(model))))
    assert_equal(plain_one.arrays, wrapped.arrays)
    assert wrapped.about["optimizer"] == plain_one.about["optimizer"]
    of_closure, again, permuted, accumulated = (
        recorded(name, CallsItself(), adamw, functools.partial(with_closure, number), 3, **options)
        for name, number, options in (
            ("closure", 1, {}), ("closure_again", 1, {"replay": "plain.npz"}),
            ("permuted", 1, {"replay": "closure.npz", "permute": 1}), ("accumulated", 2, {}),
        )
    )  # fmt: skip
    assert_equal(plain_one.arrays, of_closure.arrays)
    assert_equal(plain_one.arrays, again.arrays)
    assert of_closure.about["micro_batches"] == [1, 1, 1]
    assert accumulated.about["micro_batches"] == [2, 2, 2]
    for step in range(3):
        data = [trace.kind("data", step)["0"] for trace in (of_closure, permuted)]
        assert not np.array_equal(*data)
        for kind in ("raw", "clipped"):
            without_bias = (
                {name.removeprefix("net."): x for name, x in trace.kind(kind, step).items()}
                for trace in (of_closure, permuted)
            )
            assert_close(*without_bias)


def case_several_closure_calls():
    """LBFGS calls a closure several times in a step: its steps are left out, with one warning."""
    bits = []
    for path in (None, "lbfgs.npz"):
        model = CallsItself()
        optimizer = torch.optim.LBFGS(model.parameters(), 0.01, max_iter=2)
        steps_of = functools.partial(with_closure, 1)
        with warnings.catch_warnings(record=True) as told:
            bits.append(train(model, optimizer, path, steps_of, 3))
    assert is_equal(*bits)
    assert ["calls its closure several times" in str(each.message) for each in told] == [True]
    refused("lbfgs.npz: has no steps", compare, "lbfgs.npz", "lbfgs.npz")


def of_examples(times, shown, model, optimizer, step):
    """Trains with gradients of each example by torch.func; some losses are shown before."""
    if step in shown:
        loss_of(model, step).item()

    def loss_of_one(weights, x, y):
        return F.mse_loss(functional_call(model, weights, (x[None],)), y[None])

    weights = {n: p.detach() for n, p in model.named_parameters()}
    found = vmap(grad(loss_of_one), (None, 0, 0))(weights, *batch(step))
    for name, p in model.named_parameters():
        p.grad = found[name].mean(0) * times
    optimizer.step()
    optimizer.zero_grad()


def case_functions_of_gradients():
    """Gradients of each example by torch.func: what is applied is recorded, and compared.

    A step ends at its update, also where the script calls the model to show a loss.
    """
    bits = []
    for path, times, shown in (
        (None, 1, []), ("one.npz", 1, []), ("again.npz", 1, []), ("shown.npz", 1, [0, 2]),
        ("scaled.npz", 2, []),
    ):  # fmt: skip
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
        steps_of = functools.partial(of_examples, times, shown)
        with warnings.catch_warnings(record=True) as told:
            bits.append(train(model, adamw(model), path, steps_of, 3, modules=True))
        within = ["called within torch.func" in str(each.message) for each in told]
        assert within == ([True] if path else [])
    assert is_equal(*bits[:2])
    assert compare("one.npz", "again.npz").ok
    assert Trace("shown").about["steps"] == [0, 1, 2] and compare("one.npz", "shown.npz").ok
    verdict = compare("one.npz", "scaled.npz")
    assert node_of(verdict) in ("loss", "sum") and " = 2·G" in verdict.formula[0], str(verdict)


@torch.no_grad()
def of_losses(factor, model, optimizers, step):
    """Trains with losses of the model with noise, as evolution strategies do, and no autograd."""
    generator = torch.Generator().manual_seed(step)
    noise = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
    losses = []
    for sign in (1, -2, 1):  # The last one takes the noise away.
        for p, own in zip(model.parameters(), noise, strict=True):
            p.add_(own, alpha=0.1 * sign)
        losses.append(loss_of(model, step))
    for p, own in zip(model.parameters(), noise, strict=True):
        p.grad = own * (losses[0] - losses[1]) * factor
    for optimizer in optimizers:
        optimizer.step()


def case_losses_without_autograd():
    """A step begins at the end of the one before, not where weights have noise for a while."""
    bits = []
    for path, factor, options in (
        (None, 1, {}), ("one.npz", 1, {}), ("other.npz", 1.5, {"replay": "one.npz"}),
    ):  # fmt: skip
        model = Halves()
        optimizers = [adamw(model.first), momentum(model.second)]
        steps_of = functools.partial(of_losses, factor)
        with warnings.catch_warnings(record=True) as told:
            bits.append(train(model, optimizers, path, steps_of, 3, steps=3, **options))
        assert ["begins at its update" in str(x.message) for x in told] == [True] * len(options)
    assert is_equal(*bits[:2])
    one, other = Trace("one"), Trace("other")
    assert one.about["steps"] == other.about["steps"] == [0, 1, 2]
    for step in (2, 3):
        for index in range(4):
            before = one.arrays[f"{step}/before/0/{index}"]
            assert np.array_equal(before, one.arrays[f"{step - 1}/after/0/{index}"])
            assert np.array_equal(before, other.arrays[f"{step}/before/0/{index}"])
    assert not np.array_equal(one.arrays["1/after/0/0"], other.arrays["1/after/0/0"])
    verdict = compare("one.npz", "other.npz")
    assert node_of(verdict) in ("loss", "sum") and " = 1.5·G" in verdict.formula[0], str(verdict)


def case_modules_beyond_a_limit():
    """All modules together are left out beyond a limit; those of a pattern are not."""
    usual = modules.MOST_BYTES
    modules.MOST_BYTES = 2000
    try:
        for name, pattern in (("all", True), ("some", "4")):
            with warnings.catch_warnings(record=True) as told:
                trace = recorded(name, network(), modules=pattern, num_steps=2, steps=2)
            has_arrays = any("/module_" in key for key in trace.arrays)
            said = ["are not recorded; pass a pattern" in str(each.message) for each in told]
            assert (has_arrays, said) == ((True, []) if name == "some" else (False, [True]))
            assert trace.about["steps"] == [0, 1]
    finally:
        modules.MOST_BYTES = usual
