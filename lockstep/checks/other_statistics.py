"""Compares the moving statistics of BatchNorm after a step with those of another trace."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.arithmetic import EPS, MARGIN, TINY, dense, factor_of, norm, ratio, same_bits
from lockstep.context import Context
from lockstep.oracles.recording import StepPair, Tolerance
from lockstep.trace import STATISTIC
from lockstep.verdict import Finding

_CLOSE = 1e-4
_OTHER_SHARE = 1e-3  # Momentum settings are short numbers.


class MovingStatistic(NamedTuple):
    """A moving statistic in a step of two recordings, in float64.

    Attributes:
        name: name in the first recording.
        is_variance: whether it is a variance, not a mean.
        before: values before the step in both recordings.
        after: values after the step in both recordings.
        shares: weight with which each recording adds the statistic of the batch, 0.1 for a momentum
            of 0.1 in PyTorch and 0.9 in Keras; None if its layer does not record it.
    """

    name: str
    is_variance: bool
    before: np.ndarray
    after: tuple[np.ndarray, np.ndarray]
    shares: tuple[float, float] | None

    @property
    def changes(self) -> tuple[np.ndarray, np.ndarray]:
        """The changes in both recordings."""
        return self.after[0] - self.before, self.after[1] - self.before

    @property
    def of_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """The statistic of the batch in both recordings."""
        assert self.shares is not None
        first, second = (c / s for c, s in zip(self.changes, self.shares, strict=True))
        return self.before + first, self.before + second

    @property
    def rounding(self) -> float:
        """Norm of the difference of the changes that rounding the statistics can cause."""
        return MARGIN * EPS * max(map(norm, (self.before, *self.after))) + TINY

    @property
    def rounding_of_batch(self) -> float:
        """Norm of the difference of the batch statistics that rounding can cause."""
        assert self.shares is not None
        return self.rounding / min(self.shares)

    def has_equal_batch(self) -> bool:
        """Returns whether both recordings add the same statistic of the batch."""
        first, second = self.of_batch
        return norm(second - first) <= _CLOSE * norm(first) + self.rounding_of_batch


def moving_statistics(pair: StepPair) -> list[MovingStatistic]:
    """Returns the statistics that both recordings have, in the order of the first."""
    before, _ = pair.states("before")
    first, second = pair.states("after")
    found = []
    for name in pair.first.of_kind(STATISTIC):
        if name not in before or name not in second or before[name].dtype.kind != "f":
            continue
        after = dense(first[name]), dense(second[name])
        shares = _share(pair.first, name), _share(pair.second, pair.in_second(name))
        both = (shares[0], shares[1]) if shares[0] and shares[1] else None
        is_variance = "var" in name.replace("/", ".").split(".")[-1].lower()
        found.append(MovingStatistic(name, is_variance, dense(before[name]), after, both))
    return found


def _share(step: Context, name: str) -> float | None:
    layers = [layer for layer in step.trace.about.layers if "BatchNorm" in str(layer.get("class"))]
    own = [layer for layer in layers if name in layer.get("weights", ())]
    return _share_of_layers(own or layers)


def _share_of_layers(layers: Sequence[Mapping[str, Any]]) -> float | None:
    for layer in layers:
        if isinstance(momentum := layer.get("momentum"), float):
            share = 1 - momentum if layer["class"] == "BatchNormalization" else momentum
            return share if share > 0 else None
    return None


Explained = tuple[bool, str, str, Sequence[MovingStatistic]]  # By design?, cause, sentence.


def compare_statistics(pair: StepPair, allowed: float) -> list[Finding] | None:
    """Compares the statistics after a step that starts from equal ones.

    Args:
        pair: the step, with equal states before it.
        allowed: relative difference that rounding can cause in the change of a statistic.

    Returns:
        The findings; None if a trace has no statistics.
    """
    statistics = moving_statistics(pair)
    if not statistics:
        return None
    changes = [{s.name: s.changes[i] for s in statistics} for i in range(2)]
    far = Tolerance({}, allowed, "").wrong(changes[1], changes[0])
    wrong = [
        each
        for each in statistics
        if each.name in far and norm(np.subtract(*each.changes)) > each.rounding
    ]
    return [
        pair.found(
            "statistics", cause, text, design=design, tensors=[each.name for each in explained],
            distance=max(far[each.name] for each in explained), allowed=allowed,
        )
        for design, cause, text, explained in _causes(pair, wrong)
        if explained
    ]  # fmt: skip


def _causes(pair: StepPair, wrong: Sequence[MovingStatistic]) -> Iterator[Explained]:
    """Yields explanations of different statistics."""
    if not wrong:
        return
    if all(each.shares for each in wrong):
        yield from _by_batches(pair, wrong)
    else:
        yield _scaled_or_other(pair, wrong)


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
        yield False, "other_batch_norm_momentum", text, others
    left = [each for each in wrong if not each.has_equal_batch()]
    means = {_layer_of(each) for each in left if not each.is_variance}
    # If the mean of a layer differs, its batch differs.
    variances = [each for each in left if each.is_variance and _layer_of(each) not in means]
    unbiased = _unbiased(pair, variances)
    if unbiased is not None:
        yield True, "unbiased_variance", unbiased, variances
        left = [each for each in left if not any(each is v for v in variances)]
    if left and others:
        yield _other(pair, left)
    elif left:
        yield _scaled_or_other(pair, left)


def _scaled_or_other(pair: StepPair, wrong: Sequence[MovingStatistic]) -> Explained:
    """Explains statistics by a common factor of their changes, if there is one."""
    first, second = ({each.name: each.changes[i] for each in wrong} for i in range(2))
    scale = factor_of(list(second.values()), list(first.values()))
    scaled = {name: scale * change for name, change in first.items()}
    is_scaled = abs(scale - 1) > _OTHER_SHARE and not Tolerance({}, _CLOSE, "").wrong(
        second, scaled
    )
    if not is_scaled:
        return _other(pair, wrong)
    text = f"each statistic changes {scale:.4g} times as much as in the first recording"
    return False, "other_batch_norm_momentum", text, wrong


def _layer_of(statistic: MovingStatistic) -> str:
    return statistic.name.replace("/", ".").rpartition(".")[0]


def _other(pair: StepPair, wrong: Sequence[MovingStatistic]) -> Explained:
    for step, which in pair.both:
        names, after = step.of_kind(STATISTIC), step.named("after")
        if any(not same_bits(after[0][n], other[n]) for other in after[1:] for n in names):
            text = f"each replica of the {which} recording has the statistics of its own examples"
            return True, "local_statistics", text, wrong
    return False, "other_statistics", f"{len(wrong)} moving statistics differ", wrong


def _unbiased(pair: StepPair, variances: Sequence[MovingStatistic]) -> str | None:
    """Explains variances by n / (n - 1); n is at least the number of examples."""
    ratios = []
    for each in variances:
        first, second = each.of_batch
        times = factor_of([second], [first])
        slack = 20 * _CLOSE + ratio(each.rounding_of_batch, norm(second))
        if norm(second - times * first) > slack * norm(second):
            return None
        ratios.append(max(times, 1 / times) if times > 0 else np.inf)
    sizes = [size for step, _ in pair.both for size in step.sizes]
    smallest = max(2, min(sizes))
    if not ratios or max(ratios) > smallest / (smallest - 1) * 1.01:
        return None
    largest = variances[int(np.argmax(ratios))]
    is_second = norm(largest.of_batch[1]) > norm(largest.of_batch[0])
    return (
        f"the variance of a batch is up to {max(ratios):.6g} times as large in the"
        f" {'second' if is_second else 'first'} recording: n / (n - 1), the unbiased one"
    )
