"""What a factor of gradients means: one table for every node at which it is found."""

from collections.abc import Iterator

from lockstep.context import Context
from lockstep.explain.axes import sizes_of_axes
from lockstep.explain.loss_values import are_of_whole_batch
from lockstep.explain.rows import Meaning
from lockstep.reference import StepPair

_OF_AXES = "sum_instead_of_mean", "mean_instead_of_sum"
_SHARE = 1e-4  # Relative; of factors that arrays give.


def meanings(
    pair: StepPair, times: float, *, of_sum: bool = False, within: float = _SHARE
) -> list[Meaning]:
    """Returns what a common factor of all gradients means, the most likely first.

    Equal numbers with different causes, as 2 replicas and 2 micro-batches, are told apart by the
    node: what a shard sends has the factors of its loss, a sum has those of the replicas.

    Args:
        pair: the step.
        times: the factor.
        of_sum: whether the sum has the factor, and not what is sent.
        within: relative error of the factor.
    """
    of_parts = [*_of_micro_batches(pair), *sizes_of_axes(pair)]
    of_replicas = [*_of_ended_replicas(pair), *_of_replicas(pair)]
    known = of_replicas + of_parts
    if not of_sum:
        known = [*_of_whole_losses(pair), *_in_order(pair, of_parts, of_replicas)]
    known += _of_examples(pair)
    of_short = list(_of_short_batch(pair))
    known = of_short + known if of_short and _agree_at_first(pair) else known + of_short
    known += _of_weights(pair)
    found: dict[str, str] = {}  # One reason for each cause, the most likely first.
    for factor, cause, reason in known:
        if factor == 1 or abs(times - factor) >= within * abs(factor):
            continue
        if cause in _OF_AXES and reason not in found.get(cause, reason):
            found[cause] += f", or {reason}"  # Replicas and an axis of the model have one size.
        found.setdefault(cause, reason)
    ordered = sorted(found.items(), key=lambda each: each[0] == "scaled_gradient")  # Says least.
    return [Meaning(*each) for each in ordered]


Known = tuple[float, str, str]  # Factor, cause, reason.


def _in_order(pair: StepPair, of_parts: list[Known], of_replicas: list[Known]) -> list[Known]:
    """Returns the factors of what a shard sends.

    Wrappers compute means. Of as many micro-batches in both, a mean is more likely than a division
    by their number.
    """
    means = [known for known in of_replicas if known[1] == "mean_instead_of_sum"]
    sums = [known for known in of_replicas if known not in means]
    counts = {step.trace.micro_batches(step.position, 0) for step, _ in pair.both}
    return [*means, *of_parts, *sums] if len(counts) == 1 else [*of_parts, *means, *sums]


def _of_whole_losses(pair: StepPair) -> Iterator[Known]:
    """Yields the factor of losses that each replica computes from the outputs of all of them."""
    second, first = (step.trace.about.num_replicas for step, _ in pair.both)
    if second > first and are_of_whole_batch(pair):
        why = (
            "the loss of each replica is that of the whole batch, and its gradient reaches only the"
            f" replica's own part of what it is computed from; the mean divides it by {second}"
        )
        yield first / second, "forgotten_backward_sum", why


def _of_replicas(pair: StepPair) -> Iterator[Known]:
    second, first = (step.trace.about.num_replicas for step, _ in pair.both)
    if second != first:
        yield second / first, "sum_instead_of_mean", "the number of replicas"
        yield first / second, "mean_instead_of_sum", "one over the number of replicas"


def _of_ended_replicas(pair: StepPair) -> Iterator[Known]:
    """Yields the factor of a mean over all replicas, some of which have no batch left."""
    left, ended = pair.second.trace.about.num_replicas, pair.second.num_absent
    if ended:
        why = f"it is divided by {left + ended} replicas, and {ended} of them have no batch left"
        yield left / (left + ended), "wrong_count", why


def _of_micro_batches(pair: StepPair) -> Iterator[Known]:
    """Yields the factors that a wrong number of micro-batches, or a loss scale, gives."""
    first, second = (
        step.trace.micro_batches(step.position, 0) for step in (pair.first, pair.second)
    )
    cause = "micro_batches_not_averaged"
    yield second, cause, f"the loss is not divided by the {second} micro-batches of a step"
    yield 1 / second, cause, f"the loss is divided by the {second} micro-batches of a step twice"
    yield (
        second / first,
        cause,
        (
            f"the loss is divided by {first}, the micro-batches of the first recording, and a"
            f" replica accumulates {second}"
        ),
    )
    yield (
        first / second,
        cause,
        (
            f"gradients are those of {first} micro-batches, as in the first recording, and a"
            f" replica accumulates {second}"
        ),
    )
    scale = pair.second.trace.loss_scale(pair.second.position, 0)
    why = f"the loss scale, {scale:g}, by which they are not divided before the update"
    yield scale, "loss_scale_left", why
    by = pair.gradients.divisor
    why = f"{by:.6g}, by which the first recording divides gradients after the backward pass"
    yield by, "loss_scale_left" if _is_loss_scale(pair, by) else "scaled_gradient", why
    why = f"one over the loss scale, {scale:g}: they are divided by it without having it"
    yield 1 / scale, "scaled_gradient", why


def _is_loss_scale(pair: StepPair, number: float) -> bool:
    """Returns whether a divisor is a power of two, and no number of examples or their elements."""
    leaves = zip(*pair.first.data, strict=False)
    counts = {sum(pair.first.sizes), *(sum(a.size for a in arrays) for arrays in leaves)}
    whole = round(number)
    is_power = whole > 1 and not whole & (whole - 1) and abs(number - whole) < _SHARE * whole
    return is_power and whole not in counts


def _of_examples(pair: StepPair) -> Iterator[Known]:
    sizes = {sum(step.sizes): "the batch" for step, _ in pair.both}
    sizes |= {step.sizes[0]: "a replica" for step, _ in pair.both if len(step.sizes) > 1}
    for size, whose in sizes.items():
        for factor in (size, 1 / size) if size > 1 else ():
            yield factor, "other_loss_reduction", f"{whose} has {size} examples: sum, not mean"


def _of_short_batch(pair: StepPair) -> Iterator[Known]:
    size, full = sum(pair.second.sizes), sum(Context(pair.second.trace, 0).sizes)
    if 0 < size < full:
        why = f"divided by {full} examples, as in full batches, and this one has {size}"
        yield size / full, "wrong_count", f"the loss is {why}"
        why = f"the loss of the first recording is {why}"
        yield full / size, "other_loss_reduction", why


def _of_weights(pair: StepPair) -> Iterator[Known]:
    """Yields the factors of means over examples that have weights."""
    for step, which in pair.both:
        count = step.sizes[0]
        arrays = [a for a in step.data[0] if a.size == count > 0 and a.dtype.kind == "f"]
        for mean in [float(a.mean()) for a in arrays if a.min() >= 0 < a.mean()]:
            why = (
                f"{mean:.6g} is the mean of the weights of the examples in the {which} recording;"
                " one script divides by their sum, the other by their number"
            )
            yield mean, "other_loss_reduction", why
            yield 1 / mean, "other_loss_reduction", why


def _agree_at_first(pair: StepPair) -> bool:
    """Returns whether the gradients of the first recorded step agree."""
    start = next(pair.steps())
    is_first = start.first.position == start.second.position == 0 and start.starts_equally
    return is_first and bool(start.gradients.reference) and not start.different_gradients
