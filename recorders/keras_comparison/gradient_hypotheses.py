"""Hypotheses that explain wrong gradients of a replica."""

from collections.abc import Callable, Iterator
from functools import partial

from .context import StepContext
from .distances import scaled_by
from .expected_gradients import expected_gradients
from .recorder_imports import Arrays
from .shifted_targets import with_shifted_targets

Hypothesis = tuple[str, str, Callable[[], Arrays]]  # Cause, text, gradients to send.


def gradient_hypotheses(context: StepContext, r: int) -> Iterator[Hypothesis]:
    """Yields hypotheses about wrong gradients of replica r."""
    zeros = [scaled_by(g, 0.0) for g in context.per_replica("raw")[r]]
    yield "frozen", "0", lambda: zeros
    yield from _of_the_step_before(context, r)
    if context.has("loss"):
        yield from _of_regularisation(context, r)
    if context.modal_layers:
        yield (
            "inference_mode", "those of the model in inference mode",
            lambda: context.without(context.modal_layers, lambda: expected_gradients(context, r)),
        )  # fmt: skip
    for other in context.replicas if context.one.random_layers else ():
        if other != r:
            state = context.with_seeds_of(other, context.per_replica("before")[r])
            yield (
                "same_random_numbers", f"those with the seeds of replica {other}",
                partial(expected_gradients, context, r, state=state),
            )  # fmt: skip
    yield from _of_other_examples(context, r)


def _of_the_step_before(context: StepContext, r: int) -> Iterator[Hypothesis]:
    """Yields gradients of the previous step, and of its weights."""
    if old := context.earlier("raw"):
        yield "stale_gradient", "those of the previous step", lambda: old[r]
    if context.follows:
        state = context.per_replica("before", context.position - 1)[r]
        yield (
            "stale_gradient", "those for the weights of the previous step",
            lambda: expected_gradients(context, r, state=state),
        )  # fmt: skip


def _of_regularisation(context: StepContext, r: int) -> Iterator[Hypothesis]:
    """Yields gradients with repeated regularisation, and without any."""
    scales = context.scales[r]
    for factor in (len(context.replicas), 0):
        cause = "regulariser_repeated" if factor else "regulariser_missing"
        part = scales[0], scales[1] * factor
        yield (
            cause, f"those of a loss that contains regularisation {factor} times",
            partial(expected_gradients, context, r, scales=part),
        )  # fmt: skip


def _of_other_examples(context: StepContext, r: int) -> Iterator[Hypothesis]:
    """Yields gradients for shifted targets, and for the examples of other replicas."""
    for moved in with_shifted_targets(context.one, context.used[r]):
        yield (
            "labels_shifted", "those for targets shifted by one example",
            partial(expected_gradients, context, r, data=moved),
        )  # fmt: skip
    for other in context.replicas:
        if other != r:
            data, starts = context.data[other], context.starts[other]
            yield (
                "same_examples", f"those for the examples of replica {other}",
                partial(expected_gradients, context, r, data=data, starts=starts),
            )  # fmt: skip
