"""Computes the data losses of a step, and explains a wrong sum."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from lockstep.arithmetic import EPS, MARGIN, TINY
from lockstep.context import Context
from lockstep.oracles import Batch


@dataclasses.dataclass(frozen=True)
class Losses:
    """Data losses of a step, without regularisation.

    Attributes:
        taken: for each replica, the recorded loss.
        own: for each replica, the loss of the recorded predictions on one device.
        whole: the loss of the global batch on one device.
        plain: `own` without weights and masks.
        plain_whole: `whole` without weights and masks.
        sizes: number of examples of each replica.
        allowed: relative distance that rounding can cause.
    """

    taken: list[float]
    own: list[float]
    whole: float
    plain: list[float]
    plain_whole: float
    sizes: list[int]
    allowed: float

    @property
    def size(self) -> float:
        """The reference size of relative distances, from the finite losses."""
        whole, *taken = (abs(x) if np.isfinite(x) else 0.0 for x in (self.whole, *self.taken))
        return max(whole, sum(taken), TINY)

    @property
    def apart(self) -> float:
        """The relative distance of the replicas' sum from the loss of the whole batch."""
        return abs(sum(self.taken) - self.whole) / self.size

    @property
    def are_right(self) -> bool:
        """Whether the replicas' losses add up to that of the whole batch."""
        return self._near(sum(self.taken), self.whole) and not self.odd

    @property
    def odd(self) -> list[int]:
        """The replicas whose loss is not a fraction of the loss of their own examples."""
        shares = [s for s, own in enumerate(self.own) if not self.is_share(s, own)]
        # A custom step may weight its examples in any way, if the sum is right.
        regular = len(shares) == len(self.own) and self._near(sum(self.taken), self.whole)
        return [] if regular else shares

    def is_share(self, r: int, loss: float) -> bool:
        """Returns whether a replica's loss equals this loss, or its part of the batch."""
        shares = 1.0, 1 / len(self.own), self.sizes[r] / sum(self.sizes)
        return any(self._near(self.taken[r], share * loss) for share in shares)

    @property
    def common_factor(self) -> float | None:
        """The common factor of all replicas' parts of the loss; None if they differ."""
        num = len(self.own)
        if not all(self.own) or not np.isfinite(self.own).all():
            return None
        factors = [t * num / o for t, o in zip(self.taken, self.own, strict=True)]
        same = np.allclose(factors, factors[0], self.allowed, 0)
        return factors[0] if same and factors[0] > 0 else None

    def repeated(self, regular: float) -> float | None:
        """Returns how many times too often regularisation is in the replicas' data losses.

        Args:
            regular: regularisation on one device.

        Returns:
            None if it does not explain each replica's loss; -1 if it is missing.
        """
        if not regular:
            return None
        extra, num = (sum(self.taken) - self.whole) / regular, len(self.own)
        shares = [size / sum(self.sizes) for size in self.sizes], [1 / num] * num
        fits = [
            all(
                self._near(taken, share * own + extra * regular / num)
                for taken, share, own in zip(self.taken, part, self.own, strict=True)
            )
            for part in shares
        ]
        is_whole = abs(extra - round(extra)) < 1e-3 and round(extra) != 0
        return extra if any(fits) and is_whole else None

    @property
    def by_size(self) -> float:
        """The mean of the replicas' own losses, weighted by their numbers of examples."""
        pairs = zip(self.own, self.sizes, strict=True)
        return sum(own * size / sum(self.sizes) for own, size in pairs)

    @property
    def is_plain_sum(self) -> bool:
        """Whether losses without weights and masks are the mean over examples."""
        pairs = zip(self.plain, self.sizes, strict=True)
        mean = sum(plain * size / sum(self.sizes) for plain, size in pairs)
        return abs(mean - self.plain_whole) <= self.allowed * max(abs(self.plain_whole), TINY)

    def why(self) -> tuple[str, str]:
        """Returns cause and text of a sum that differs from the loss of the whole batch."""
        if explained := self._why_means():
            return explained
        num, taken, whole, factor = len(self.own), sum(self.taken), self.whole, self.common_factor
        if factor is not None and self._near(self.by_size, whole):
            often = ": they are divided by the number of replicas twice"
            return "scaled_gradient", (
                f"each replica's loss and gradients are {factor:.4g} times the replica's share of"
                f" those of the batch{often if abs(factor * num - 1) < 1e-3 else ''}"
            )
        return "other_loss", (
            f"the replicas' losses ({', '.join(f'{t:.6g}' for t in self.taken)}) add up to"
            f" {taken:.6g}; the compiled loss of their predictions is {self._each}, and"
            f" {whole:.6g} for the whole batch"
        )

    def _why_means(self) -> tuple[str, str] | None:
        """Explains a sum of the replicas' losses, or their mean."""
        num, sizes, taken, whole = len(self.own), self.sizes, sum(self.taken), self.whole
        once = all(self._near(t, o) for t, o in zip(self.taken, self.own, strict=True))
        mean = self._near(taken, sum(self.own) / num) and not self.odd
        is_by_size = self._near(self.by_size, whole)
        if once and is_by_size:
            return "scalar_loss_not_divided", (
                f"the replicas' losses ({self._each}) are not divided by the number of replicas,"
                f" {num}: their sum is {taken:.6g}, the loss of the whole batch is {whole:.6g}, so"
                f" the gradients are {taken / whole:.4g} times too large"
            )
        if mean and len(set(sizes)) > 1 and is_by_size:
            return "mean_of_means", (
                f"the replicas have {'/'.join(map(str, sizes))} examples; the mean of their means"
                f" is {taken:.6g}, the mean over all examples is {whole:.6g}"
            )
        if (mean or once) and self.is_plain_sum and not is_by_size:
            return "weighted_mean_of_means", (
                "each replica divides by the sum of the weights, or unmasked steps, of its"
                f" examples: the mean of the replicas' losses ({self._each}) is {taken:.6g}, the"
                f" weighted mean of the whole batch is {whole:.6g}"
            )
        if (mean or once) and not self.is_plain_sum:
            return "not_a_sum_over_examples", (
                f"the loss of a batch is not the mean of its examples' losses: it is {whole:.6g}"
                f" for the whole batch and {self._each} for the shards"
            )
        return None

    @property
    def _each(self) -> str:
        return ", ".join(f"{own:.6g}" for own in self.own)

    def _near(self, number: float, other: float) -> bool:
        if not np.isfinite(other):
            return not np.isfinite(number)
        return bool(abs(number - other) <= self.allowed * self.size)


def regular_share(context: Context, shard: int) -> float:
    """Returns the fraction of one device's regularisation that a shard adds."""
    if shard in context.facts.exact:
        return 1 / len(context.shards)
    own = context.expected(shard).step.loss
    if not own or not own[1]:
        return 1 / len(context.shards)
    return float(np.sum(context.arrays("loss")[shard][1])) / own[1]


def recorded_losses(context: Context, *, exactly: bool = False) -> Losses:
    """Returns the recorded data losses, and those of the recorded predictions.

    Args:
        context: the step.
        exactly: whether the recorded losses are known to be right.
    """
    oracle, sizes, facts = context.oracle, context.sizes, context.facts
    recorded = context.arrays("loss")
    taken = [
        float(np.sum(loss[0])) - sum(float(np.sum(part)) for part in loss[1:2]) for loss in recorded
    ]
    allowed = MARGIN * max(8 * EPS, oracle.unit if oracle.unit > EPS else 0.0)
    if exactly:
        own = [t * sum(sizes) / size if size else 0.0 for t, size in zip(taken, sizes, strict=True)]
        return Losses(taken, own, sum(taken), own, sum(taken), sizes, allowed)
    if not (context.has("y_pred") and context.has("mask")):
        own = [loss[0] if (loss := context.expected(s).step.loss) else 0.0 for s in context.shards]
        whole = sum(o * size for o, size in zip(own, sizes, strict=True)) / max(sum(sizes), 1)
        forward = MARGIN * max(context.expected(s).spread.forward for s in context.shards)
        return Losses(taken, own, whole, own, whole, sizes, max(allowed, forward))
    y_pred, masks = context.arrays("y_pred"), context.arrays("mask")

    def of_shards(weighted: bool) -> list[float]:
        return [
            oracle.loss(context.state(s), facts.used[s], y_pred[s], masks[s], weighted=weighted)
            for s in context.shards
        ]

    def of_batch(weighted: bool) -> float:
        joined = context.joined("y_pred"), context.joined("mask")
        return oracle.loss(context.state(0), context.used_by_all, *joined, weighted=weighted)

    each = of_shards(True), of_batch(True), of_shards(False), of_batch(False)
    return Losses(taken, *each, sizes, allowed)


def with_shifted_targets(context: Context, data: Batch) -> Iterator[Batch]:
    """Yields examples with their targets shifted by one example, in both directions."""
    num_inputs, _ = context.oracle.targets(data)
    for shift in (1, -1):
        yield data[:num_inputs] + [np.roll(array, shift, axis=0) for array in data[num_inputs:]]
