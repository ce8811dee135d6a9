"""Checks the losses of the shards, and the loss of the whole batch."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.answer.verdict import BY_DESIGN, FAULT, Finding
from lockstep.context import Actual, Context
from lockstep.explain.oracle_rows import other_targets
from lockstep.numeric.arrays import EPS, MARGIN, TINY, Named, are_finite, dense, factor_of, joined
from lockstep.stages.update import is_skipped


def check_loss(context: Context) -> Iterator[Finding | Actual]:
    """Checks the losses of the recorded predictions, and their sum."""
    if not context.has("loss"):
        return
    context.mark_checked("loss")
    if not context.computes:
        odd = [s for s in context.shards if not are_finite(context.arrays("loss")[s])]
        if odd and not is_skipped(context):
            yield context.found("loss", "not_finite", "the loss is NaN or infinite", items=odd)
    elif len(context.exact) == len(context.shards):
        for shard, size in enumerate(context.sizes):
            loss = context.arrays("loss")[shard][0]
            context.measure("loss", "loss", "loss", shard, loss, loss, 0.0, same=True)
            scales = size / sum(context.sizes), 1 / len(context.shards)
            yield Actual(shard, {"scales": scales})
    else:
        yield from _check_losses(context)


def _check_losses(context: Context) -> Iterator[Finding | Actual]:
    """Checks the losses that the shards compute from their own predictions."""
    losses = recorded_losses(context)
    if not losses.are_right and context.has("y_pred", "mask"):
        found = [x for shard in losses.odd for x in _other_targets_of(context, shard, losses)]
        yield from found
        context = context.knowing(found)
        losses = recorded_losses(context)
    num, sizes = len(context.shards), losses.sizes
    allowed = losses.allowed * losses.size
    context.measure("loss", "loss", "loss", 0, sum(losses.taken), losses.whole, allowed)
    known = list[Actual]()
    for shard, (taken, own) in enumerate(zip(losses.taken, losses.own, strict=True)):
        scale = taken / own if own and np.isfinite(own) else 1 / num
        known.append(Actual(shard, {"scales": (scale, regular_share(context, shard))}))
    yield from known
    context = context.knowing(known)
    if losses.are_right:
        return
    steps = [context.expected(shard).step.loss for shard in context.shards]
    regular = [loss[1] for loss in steps if loss]
    extra = losses.repeated(float(np.mean(regular))) if regular else None
    if extra is not None:
        for shard, size in enumerate(sizes):
            scales = size / sum(sizes), regular_share(context, shard) + extra / num
            yield Actual(shard, {"scales": scales})
        yield context.found(
            "regularisation", "regulariser_repeated" if extra > 0 else "regulariser_missing",
            f"the replicas' losses contain {1 + extra:.4g} times the regularisation of one device",
            distance=losses.apart, allowed=losses.allowed,
        )  # fmt: skip
        return
    cause, text = losses.why(_is_mean_of_examples(context, losses))
    explained = []
    for shard in losses.odd if cause == "other_loss" else ():
        if reason := _label_smoothing(context, shard) or _left_out(context, shard, losses):
            name, why, changes = reason
            explained.append(shard)
            yield Actual(shard, changes)
            yield context.found(
                "loss", name, why, items=(shard,), distance=losses.apart, allowed=losses.allowed
            )
    if not explained:
        yield context.found(
            "loss", cause, text, status=BY_DESIGN if cause == "not_a_sum_over_examples" else FAULT,
            items=losses.odd if cause == "other_loss" else (), distance=losses.apart,
            allowed=losses.allowed,
        )  # fmt: skip


def _other_targets_of(context: Context, shard: int, losses: "Losses") -> Iterator[Finding | Actual]:
    """Checks whether a shard's loss is that of targets of other inputs."""
    y_pred, masks = context.arrays("y_pred")[shard], context.arrays("mask")[shard]
    for detail, targets, moved in other_targets(context, shard):
        loss = context.oracle.loss(context.state(shard), moved, y_pred, masks)
        if losses.is_share(shard, loss):
            yield Actual(shard, {"data": moved})
            yield context.found("loss", detail, f"the loss is that of {targets}", items=(shard,))
            return


def _label_smoothing(context: Context, shard: int) -> tuple[str, str, dict] | None:
    """Explains a loss by targets that are spread over all classes, as it should not be.

    The gradient of the cross-entropy with respect to the logits is linear in the smoothing, which
    the gradients of the weights therefore give. Returns cause, text and changes of `Ask`.
    """
    if not context.has("y_pred", "mask"):
        return None
    oracle, data = context.oracle, context.actual[shard].data
    logits, masks = (context.arrays(kind)[shard] for kind in ("y_pred", "mask"))
    num_inputs, _ = oracle.targets(data)
    targets = data[num_inputs : num_inputs + 1]
    if len(logits) != 1 or logits[0].ndim != 2 or not targets or targets[0].ndim != 1:
        return None
    size, classes = logits[0].shape
    if targets[0].dtype.kind not in "iu" or not size or targets[0].max() >= classes:
        return None
    (start,) = oracle.loss_gradients(context.state(shard), data, logits, masks)
    more = (np.eye(classes)[targets[0]] - 1 / classes) / size
    share = size / sum(context.sizes)
    scales = share, context.actual[shard].scales[1]

    def gradients(smoothing: float) -> tuple[list[np.ndarray], Named]:
        starts = [(start + smoothing * more).astype(np.float32)]
        return starts, context.gradients(shard, starts=starts, scales=scales)

    actual, without, fully = context.named("raw")[shard], gradients(0.0)[1], gradients(1.0)[1]
    if actual.keys() != without.keys():
        return None
    apart = [dense(actual[name]) - dense(without[name]) for name in actual]
    smoothing = factor_of(apart, [dense(fully[n]) - dense(without[n]) for n in actual])
    if not 1e-3 < smoothing < 1:
        return None
    starts, predicted = gradients(smoothing)
    times = share / context.right[shard].scales[0]
    bound = context.bound([shard], times)
    if len(bound.near(actual, [(1.0, predicted)])) < len(actual):
        return None
    text = f"its gradients are those of a label smoothing of {smoothing:.3g}"
    return "label_smoothing", text, {"starts": starts, "scales": scales}


def _left_out(context: Context, shard: int, losses: "Losses") -> tuple[str, str, dict] | None:
    """Explains a loss by an example that it leaves out; returns the same as `_label_smoothing`."""
    if not context.has("y_pred", "mask"):
        return None
    oracle, state, size = context.oracle, context.state(shard), context.sizes[shard]
    arrays = context.actual[shard].data, *(context.arrays(k)[shard] for k in ("y_pred", "mask"))
    for index in range(size) if size > 1 else ():
        kept = [[np.delete(a, index, 0) if a.ndim else a for a in each] for each in arrays]
        loss = oracle.loss(state, *kept) * (size - 1) / size
        if losses.is_share(shard, loss):
            gradients = oracle.loss_gradients(state, *kept)
            starts = [np.insert(g * ((size - 1) / size), index, 0, axis=0) for g in gradients]
            scales = losses.taken[shard] / loss, context.actual[shard].scales[1]
            text = f"the loss leaves out example {index + 1} of {size}"
            return "lost_examples", text, {"starts": starts, "scales": scales}
    return None


@dataclasses.dataclass(frozen=True)
class Losses:
    """Data losses of a step, without regularisation.

    Attributes:
        taken: for each replica, the recorded loss.
        own: for each replica, the loss of the recorded predictions on one device.
        whole: the loss of the global batch on one device.
        sizes: number of examples of each replica.
        allowed: relative distance that rounding can cause.
    """

    taken: list[float]
    own: list[float]
    whole: float
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

    def by_size(self, losses: Sequence[float]) -> float:
        """Returns the mean of the replicas' losses, weighted by their numbers of examples."""
        pairs = zip(losses, self.sizes, strict=True)
        return sum(loss * size for loss, size in pairs) / sum(self.sizes)

    def why(self, is_mean: bool) -> tuple[str, str]:
        """Returns cause and text of a sum that differs from the loss of the whole batch.

        Args:
            is_mean: whether the loss without weights and masks is the mean over the examples.
        """
        num, sizes, taken, whole = len(self.own), self.sizes, sum(self.taken), self.whole
        once = all(self._near(t, o) for t, o in zip(self.taken, self.own, strict=True))
        mean = self._near(taken, sum(self.own) / num) and not self.odd
        is_by_size = self._near(self.by_size(self.own), whole)
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
        if (mean or once) and is_mean and not is_by_size:
            return "weighted_mean_of_means", (
                "each replica divides by the sum of the weights, or unmasked steps, of its"
                f" examples: the mean of the replicas' losses ({self._each}) is {taken:.6g}, the"
                f" weighted mean of the whole batch is {whole:.6g}"
            )
        if (mean or once) and not is_mean:
            return "not_a_sum_over_examples", (
                f"the loss of a batch is not the mean of its examples' losses: it is {whole:.6g}"
                f" for the whole batch and {self._each} for the shards"
            )
        factors = [t * num / o if o else np.nan for t, o in zip(self.taken, self.own, strict=True)]
        are_equal = factors[0] > 0 and np.allclose(factors, factors[0], self.allowed, 0)
        if are_equal and is_by_size:
            often = ": they are divided by the number of replicas twice"
            return "scaled_gradient", (
                f"each replica's loss and gradients are {factors[0]:.4g} times the replica's share"
                f" of those of the batch{often if abs(factors[0] * num - 1) < 1e-3 else ''}"
            )
        return "other_loss", (
            f"the replicas' losses ({', '.join(f'{t:.6g}' for t in self.taken)}) add up to"
            f" {taken:.6g}; the compiled loss of their predictions is {self._each}, and"
            f" {whole:.6g} for the whole batch"
        )

    @property
    def _each(self) -> str:
        return ", ".join(f"{own:.6g}" for own in self.own)

    def _near(self, number: float, other: float) -> bool:
        if not np.isfinite(other):
            return not np.isfinite(number)
        return bool(abs(number - other) <= self.allowed * self.size)


def regular_share(context: Context, shard: int) -> float:
    """Returns the fraction of one device's regularisation that a shard adds."""
    if shard in context.exact:
        return 1 / len(context.shards)
    own = context.expected(shard).step.loss
    if not own or not own[1]:
        return 1 / len(context.shards)
    return float(np.sum(context.arrays("loss")[shard][1])) / own[1]


def recorded_losses(context: Context) -> Losses:
    """Returns the recorded data losses, and those of the recorded predictions."""
    oracle, sizes, shards = context.oracle, context.sizes, context.shards
    taken = [float(np.sum(x[0])) - float(np.sum(x[1:2])) for x in context.arrays("loss")]
    allowed = MARGIN * max(8 * EPS, oracle.unit if oracle.unit > EPS else 0.0)
    if not context.has("y_pred", "mask"):
        own = [loss[0] if (loss := context.expected(s).step.loss) else 0.0 for s in shards]
        whole = sum(o * size for o, size in zip(own, sizes, strict=True)) / max(sum(sizes), 1)
        forward = MARGIN * max(context.expected(s).forward for s in shards)
        return Losses(taken, own, whole, sizes, max(allowed, forward))
    return Losses(taken, *_compiled_losses(context, weighted=True), sizes, allowed)


def _compiled_losses(context: Context, *, weighted: bool) -> tuple[list[float], float]:
    """Returns the losses of the recorded predictions: of each shard, and of the whole batch."""
    y_pred, masks, loss = context.arrays("y_pred"), context.arrays("mask"), context.oracle.loss
    own = [
        loss(context.state(s), context.actual[s].data, y_pred[s], masks[s], weighted=weighted)
        for s in context.shards
    ]
    arrays = context.used, joined(y_pred), joined(masks)
    return own, loss(context.state(0), *arrays, weighted=weighted)


def _is_mean_of_examples(context: Context, losses: Losses) -> bool:
    """Returns whether the loss without weights and masks is the mean over the examples."""
    if not context.has("y_pred", "mask"):
        return True
    own, whole = _compiled_losses(context, weighted=False)
    return abs(losses.by_size(own) - whole) <= losses.allowed * max(abs(whole), TINY)


def check_regularisation(context: Context) -> Iterator[Finding]:
    """Checks the sum of the shards' regularisation."""
    if not (context.computes and context.has("loss")) or context.exact:
        return
    recorded = context.arrays("loss")
    losses = [loss for s in context.shards if (loss := context.expected(s).step.loss)]
    if not losses or any(len(each) < 2 for each in recorded):
        return
    taken = sum(float(np.sum(loss[1])) for loss in recorded)
    if not taken and not any(regular for _, regular in losses):
        return
    context.mark_checked("regularisation")
    expected = float(np.mean([regular for _, regular in losses]))
    apart = abs(taken - expected) / max(abs(expected), TINY)
    forward = [context.expected(shard).forward for shard in context.shards]
    allowed = MARGIN * max(8 * EPS, *forward)
    if apart > allowed:
        factor = taken / expected if expected else np.inf
        cause = "regulariser_repeated" if factor > 1 else "regulariser_missing"
        yield context.found(
            "regularisation", cause,
            f"the replicas add {factor:.4g} times the regularisation of one device",
            distance=apart, allowed=allowed,
        )  # fmt: skip
