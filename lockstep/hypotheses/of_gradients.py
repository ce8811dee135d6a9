"""Predicts the gradients that a shard would send with a known fault."""

from collections.abc import Callable, Iterator
from functools import partial

from lockstep.arithmetic import scaled_all
from lockstep.checks.losses import with_shifted_targets
from lockstep.context import Context
from lockstep.hypotheses.of_states import other_states
from lockstep.trace import Named

Hypothesis = tuple[str, str, Callable[[], Named]]  # Cause, text, gradients to send.


def gradient_hypotheses(context: Context, shard: int) -> Iterator[Hypothesis]:
    """Yields hypotheses about wrong gradients of a shard."""
    zeros = scaled_all(context.named("raw")[shard], 0.0)
    yield "frozen", "0", lambda: zeros
    if old := context.earlier("raw"):
        yield "stale_gradient", "those of the previous step", lambda: old[shard]
    if context.follows and context.trace.has(context.position - 1, "data"):
        position = context.position - 1
        old_step = {
            "state": context.state(shard, position),
            "data": context.trace.arrays(position, "data", shard),
        }
        yield (
            "stale_gradient", "those of the previous step",
            partial(context.gradients, shard, **old_step),
        )  # fmt: skip
    yield from _of_other_shards(context, shard)
    for name, value in context.state(shard).items():
        if name.endswith("loss_scale") and value.ndim == 0 and value != 1:
            text = f"multiplied by the loss scale, {float(value):g}"
            expected = context.gradients(shard)
            yield "loss_scale_left", text, partial(scaled_all, expected, float(value))
    yield from _of_regularisation(context, shard)
    if context.modal_layers:
        off = context.modal_layers
        yield (
            "inference_mode", "those of the model in inference mode",
            lambda: context.gradients(shard, off=off),
        )  # fmt: skip
    for other in context.shards if context.oracle.random_layers else ():
        if other != shard:
            state = context.with_seeds_of(other, context.state(shard))
            yield (
                "same_random_numbers", f"those with the seeds of replica {other}",
                partial(context.gradients, shard, state=state),
            )  # fmt: skip
    yield from _of_other_examples(context, shard)
    asked = context.ask(shard, scales=context.facts.scales[shard])
    for cause, text, predict in context.oracle.backward_faults(asked):
        yield cause, text, predict
    for cause, text, changes in other_states(context, shard):
        yield cause, text, partial(context.gradients, shard, **changes)


def _of_other_shards(context: Context, shard: int) -> Iterator[Hypothesis]:
    """Yields the gradients that other shards send."""
    raw = context.named("raw")
    for other in context.shards:
        if other != shard:
            name = context.trace.name_of("raw", other)
            yield "same_examples", f"those that {name} sends", partial(raw.__getitem__, other)


def _of_regularisation(context: Context, shard: int) -> Iterator[Hypothesis]:
    """Yields gradients with repeated regularisation, and without any."""
    if not context.has("loss"):
        return
    scales = context.facts.scales[shard]
    for factor in (len(context.shards), 0):
        cause = "regulariser_repeated" if factor else "regulariser_missing"
        part = scales[0], scales[1] * factor
        yield (
            cause, f"those of a loss that contains regularisation {factor} times",
            partial(context.gradients, shard, scales=part),
        )  # fmt: skip


def _of_other_examples(context: Context, shard: int) -> Iterator[Hypothesis]:
    """Yields gradients for shifted targets, and for the examples of other shards."""
    for moved in with_shifted_targets(context, context.facts.used[shard]):
        yield (
            "labels_shifted", "those for targets shifted by one example",
            partial(context.gradients, shard, data=moved),
        )  # fmt: skip
    for other in context.shards:
        if other != shard:
            data, starts = context.data[other], context.facts.starts[other]
            name = context.trace.name_of("raw", other)
            yield (
                "same_examples", f"those for the examples of {name}",
                partial(context.gradients, shard, data=data, starts=starts),
            )  # fmt: skip
