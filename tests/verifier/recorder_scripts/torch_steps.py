"""Cases of PyTorch: what belongs to a step, however the script calls the model and updates it."""
# ruff: noqa: F403, F405 (the names of `torch_training`)

import contextlib
import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from lockstep import compare
from lockstep.data import file as trace_file
from lockstep.recorders.torch import modules
from recording import Trace
from torch_training import *


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

    for is_outside, dtype in ((True, "float16"), (False, "")):
        own = functools.partial(steps_of, is_outside)
        trace = recorded("autocast", None, adamw, own, 1, steps=1)
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

    about = recorded("modes", network(0.3), adamw, steps_of, 3).about
    assert about["in_evaluation"] == [[], ["3"], ["", "0", "1", "2", "3", "4"]]
    assert about["micro_batches"] == [1, 1, 1]


def case_repeated_update():
    """A second update with the same gradients belongs to the same step."""

    def steps_of(model, optimizer, step):
        plain(model, optimizer, step)
        optimizer.step()

    twice = recorded("twice", None, adamw, steps_of, 3, steps=[0, 2])
    assert twice.about["steps"] == [0, 2]
    counts = [twice.kind(kind, 2)["0.weight/step"] for kind in ("before", "after")]
    assert counts == [4, 6]


@torch.no_grad()
def clamp(model, *_):
    for p in model.parameters():
        p.clamp_(-0.1, 0.1)


def case_changes_after_the_update():
    """What the script changes in the weights then belongs to the step, also in a hook."""
    for is_hook in (False, True):

        def steps_of(model, optimizer, step, is_hook=is_hook):
            if is_hook and step == 0:
                optimizer.register_step_post_hook(lambda *_: clamp(model))
            plain(model, optimizer, step)
            if not is_hook:
                clamp(model)

        trace = recorded("clamped", Halves(), adamw, steps_of, 2, steps=2)
        for step in (0, 1):
            after, left = trace.kind("after", step)["first.weight"], trace.kind("left", step)
            assert ("0" in left) != is_hook
            assert np.abs(left.get("0", after)).max() == np.float32(0.1)


def case_skipped():
    """A GradScaler skips the second update: the step begins again, or ends with the training."""

    def steps_of(is_last, model, optimizer, step):
        (loss_of(model, step) * (float("inf") if step == 1 else 1)).backward()
        if step != 1:
            optimizer.step()
        if not is_last or step != 1:
            optimizer.zero_grad()

    own = functools.partial(steps_of, False)
    skipped = recorded("skipped", None, adamw, own, 3, steps=2)
    assert skipped.about["micro_batches"] == [1, 1] and skipped.about["steps"] == [0, 1]
    assert skipped.kind("data", 1).keys() == {"0"} and skipped.about["skipped"] == 1
    own = functools.partial(steps_of, True)
    ended = recorded("ended", None, adamw, own, 2, steps=2)
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


def case_backward_passes():
    """What autograd computes in each pass of a step that has several, also if an engine adds it."""
    losses = []

    def steps_of(way, model, optimizer, step):
        optimizer.zero_grad(set_to_none=way != "zeros")
        weights, sums = [*model.parameters()], [0, 0, 0, 0]
        for number in range(1 if way == "one" else 3):
            x, y = batch(number)
            if way == "functional":  # Without a module.
                hidden = F.linear(x.flatten(1), *weights[:2])
                outputs = F.linear(hidden, *weights[2:])
            elif way == "parts":
                outputs = model.second(model.first(x.flatten(1)))
            else:
                outputs = model(x)
            loss = F.mse_loss(outputs, y)
            losses.append(loss.item())
            if way in ("engine", "functional"):
                own = torch.autograd.grad(loss, weights)
                sums = [a + b for a, b in zip(sums, own, strict=True)]
                continue
            loss.backward()
            if way == "cleared" and not number:
                for weight in weights:
                    weight.grad.zero_()
        if torch.is_tensor(sums[0]):
            for weight, own in zip(weights, sums, strict=True):
                weight.grad = own
        optimizer.step()

    found = {}
    for way in ("one", "plain", "zeros", "cleared", "engine", "parts", "functional"):
        losses.clear()
        num_steps = 1 if way == "functional" else 2
        own = functools.partial(steps_of, way)
        trace = recorded(way, Halves(), adamw, own, num_steps, steps=num_steps)
        assert trace.about["steps"] == [*range(num_steps)]
        assert "first.weight" in trace.kind("before")
        found[way] = trace_file.load(f"{way}.npz")
        number = 0 if way == "one" else 3
        assert len(found[way].backward_passes(0, 0)) == number
        if way == "plain":
            assert trace.about["micro_batches"] == [3, 3]
            assert {*trace.kind("data")} == {*trace.kind("random")} == {"0", "1", "2"}
            np.testing.assert_allclose(trace.kind("loss")["0"], sum(losses[:3]), rtol=1e-6)
    first = found["plain"].backward_passes(0, 0)
    assert_equal(first[0], found["one"].named(0, "raw", 0))
    for name, total in found["plain"].named(0, "clipped", 0).items():
        assert np.array_equal(first[0][name] + first[1][name] + first[2][name], total)
    for way in ("zeros", "cleared", "engine", "parts"):
        for own, other in zip(first, found[way].backward_passes(0, 0), strict=True):
            assert_equal(own, other)
    assert found["engine"].named(0, "raw", 0) is None


# --- Closures, and gradients without autograd ----------------------------------------------------


def with_closure(model, optimizer, step):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    optimizer.step(closure)


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


def of_examples(shown, model, optimizer, step):
    """Trains with gradients of each example by torch.func; some losses are shown before."""
    if step in shown:
        loss_of(model, step).item()

    def loss_of_one(weights, x, y):
        return F.mse_loss(functional_call(model, weights, (x[None],)), y[None])

    weights = {n: p.detach() for n, p in model.named_parameters()}
    found = vmap(grad(loss_of_one), (None, 0, 0))(weights, *batch(step))
    for name, p in model.named_parameters():
        p.grad = found[name].mean(0)
    optimizer.step()
    optimizer.zero_grad()


def case_functions_of_gradients():
    """A step ends at its update, also where the script calls the model to show a loss."""
    bits = []
    for path, shown in ((None, []), ("one.npz", []), ("shown.npz", [0, 2])):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
        steps_of = functools.partial(of_examples, shown)

        def train_one(model=model, path=path, steps_of=steps_of):
            bits.append(train(model, adamw(model), path, steps_of, 3, modules=True))

        within = ["called within torch.func" in text for text in warnings_of(train_one)]
        assert within == ([True] if path else [])
    assert is_equal(*bits[:2])
    assert Trace("shown").about["steps"] == [0, 1, 2] and compare("one.npz", "shown.npz").ok


@torch.no_grad()
def of_losses(model, optimizer, step):
    """Trains with losses of the model with noise, as evolution strategies do, and no autograd."""
    generator = torch.Generator().manual_seed(step)
    noise = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
    losses = []
    for sign in (1, -2, 1):  # The last one takes the noise away.
        for p, own in zip(model.parameters(), noise, strict=True):
            p.add_(own, alpha=0.1 * sign)
        losses.append(loss_of(model, step))
    for p, own in zip(model.parameters(), noise, strict=True):
        p.grad = own * (losses[0] - losses[1])
    optimizer.step()


def case_losses_without_autograd():
    """A step begins at the end of the one before, not where weights have noise for a while."""
    bits = []
    for path, options in ((None, {}), ("one.npz", {}), ("other.npz", {"replay": "one.npz"})):

        def train_one(path=path, options=options):
            model = Halves()
            bits.append(train(model, adamw(model), path, of_losses, 3, **options))

        told = ["begins at its update" in text for text in warnings_of(train_one)]
        assert told == [True] * len(options)
    assert is_equal(*bits[:2])
    one = Trace("one")
    assert one.about["steps"] == [0, 1, 2] and compare("one.npz", "other.npz").ok
    for step in (1, 2):
        for name in one.about["gradients"]:
            before, after = one.kind("before", step)[name], one.kind("after", step - 1)[name]
            assert np.array_equal(before, after)


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
