"""Compares the moving statistics of BatchNorm after a step in two recordings."""

from collections.abc import Iterator, Sequence

import numpy as np

from app.verification.recordings.norm_statistics import MovingStatistic, moving_statistics
from app.verification.recordings.recorded_step import STATISTIC, Named, RecordedStep
from app.verification.recordings.step_pair import StepPair
from app.verification.recordings.trace_arrays import distance, factor, norm, relative_distances
from app.verification.recordings.trace_finding import TraceFinding
from lockstep.verdict import BY_DESIGN, FAULT

_CLOSE = 1e-4
_OTHER_SHARE = 1e-3  # Momentum settings are short numbers.

Explained = tuple[str, str, str, Sequence[MovingStatistic]]  # Status, cause, sentence, statistics.


def compare_statistics(pair: StepPair, allowed: float) -> list[TraceFinding] | None:
    """Compares the statistics after a step that starts from equal ones.

    Args:
        pair: the step, with equal states before it.
        allowed: relative difference that rounding can cause in the change of a statistic.

    Returns:
        The findings; None if a recording has no statistics.
    """
    statistics = moving_statistics(pair)
    if not statistics:
        return None
    apart = relative_distances(
        [each.changes[1] for each in statistics], [each.changes[0] for each in statistics]
    )
    far = {each.name: value for each, value in zip(statistics, apart, strict=True)}
    wrong = [each for each in statistics if far[each.name] > allowed]
    return [
        TraceFinding(
            *("statistics", status, cause, text, (pair.number,)),
            tensors=tuple(each.name for each in explained),
            distance=max(far[each.name] for each in explained),
            allowed=allowed,
        )
        for status, cause, text, explained in _causes(pair, wrong)
        if explained
    ]


def _causes(pair: StepPair, wrong: Sequence[MovingStatistic]) -> Iterator[Explained]:
    """Yields explanations of different statistics."""
    if not wrong:
        return
    if all(each.shares for each in wrong):
        yield from _by_batches(pair, wrong)
    elif _is_scaled(wrong, scale := _scale_of(wrong)):
        yield FAULT, "other_batch_norm_momentum", _text_of_scale(scale), wrong
    else:
        yield _other(pair, wrong)


def _by_batches(pair: StepPair, wrong: Sequence[MovingStatistic]) -> Iterator[Explained]:
    """Yields explanations for statistics of layers with a known momentum."""
    shares = [each.shares or (1.0, 1.0) for each in wrong]
    others = [
        each
        for each, (first, second) in zip(wrong, shares, strict=True)
        if abs(second - first) > _OTHER_SHARE * first
    ]
    if others:
        first, second = others[0].shares or (1.0, 1.0)
        text = (
            f"{first:.4g} of each batch is added to the moving statistics in the first recording,"
            f" and {second:.4g} in the second"
        )
        yield FAULT, "other_batch_norm_momentum", text, others
    left = [each for each in wrong if not each.has_equal_batch()]
    means = {_layer_of(each) for each in left if not each.is_variance}
    # If the mean of a layer differs, its batch differs.
    variances = [each for each in left if each.is_variance and _layer_of(each) not in means]
    unbiased = _unbiased(pair, variances)
    if unbiased is not None:
        yield BY_DESIGN, "unbiased_variance", unbiased, variances
        left = [each for each in left if not any(each is v for v in variances)]
    if left and not others and _is_scaled(left, scale := _scale_of(left)):
        yield FAULT, "other_batch_norm_momentum", _text_of_scale(scale), left
    elif left:
        yield _other(pair, left)


def _layer_of(statistic: MovingStatistic) -> str:
    return statistic.name.replace("/", ".").rpartition(".")[0]


def _scale_of(statistics: Sequence[MovingStatistic]) -> float:
    """Returns the factor between the changes."""
    return factor([each.changes[1] for each in statistics], [s.changes[0] for s in statistics])


def _is_scaled(statistics: Sequence[MovingStatistic], scale: float) -> bool:
    changes = [scale * each.changes[0] for each in statistics]
    apart = relative_distances([each.changes[1] for each in statistics], changes)
    return abs(scale - 1) > _OTHER_SHARE and max(apart) < _CLOSE


def _text_of_scale(scale: float) -> str:
    return f"each statistic changes {scale:.4g} times as much as in the first recording"


def _other(pair: StepPair, wrong: Sequence[MovingStatistic]) -> Explained:
    for step, which in ((pair.second, "second"), (pair.first, "first")):
        if step.trace.num_replicas > 1 and _differ(step):
            text = f"each replica of the {which} recording has the statistics of its own examples"
            return BY_DESIGN, "local_statistics", text, wrong
    return FAULT, "other_statistics", f"{len(wrong)} moving statistics differ", wrong


def _unbiased(pair: StepPair, variances: Sequence[MovingStatistic]) -> str | None:
    """Explains variances by n / (n - 1); n is at least the number of examples."""
    ratios = []
    for each in variances:
        first, second = each.of_batch
        ratio = factor([second], [first])
        slack = 20 * _CLOSE + each.rounding / max(norm(second), 1e-30)
        if distance(second, ratio * first, max(norm(second), 1e-30)) > slack:
            return None
        ratios.append(max(ratio, 1 / ratio) if ratio > 0 else np.inf)
    sizes = [step.num_examples(r) or 0 for step in (pair.first, pair.second) for r in step.replicas]
    smallest = max(2, min(sizes))
    if not ratios or max(ratios) > smallest / (smallest - 1) * 1.01:
        return None
    largest = variances[int(np.argmax(ratios))]
    is_second = norm(largest.of_batch[1]) > norm(largest.of_batch[0])
    return (
        f"the variance of a batch is up to {max(ratios):.6g} times as large in the"
        f" {'second' if is_second else 'first'} recording: n / (n - 1), the unbiased one"
    )


def _differ(step: RecordedStep) -> bool:
    states: list[Named] = [step.state("after", r, STATISTIC) for r in step.replicas]
    return any(
        not np.array_equal(states[0][name], other[name]) for other in states[1:] for name in other
    )
