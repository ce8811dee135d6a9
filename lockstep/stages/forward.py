"""Checks each shard's predictions."""

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.answer.text import first_names
from lockstep.answer.verdict import BY_DESIGN, FAULT, NOT_COMPARED, Finding
from lockstep.context import Actual, Context
from lockstep.data.trace import STATISTIC
from lockstep.explain.axes import order_of_parts
from lockstep.explain.drawn import drawn_targets, equal_outputs
from lockstep.explain.loss_values import agree_in_each_step
from lockstep.explain.pairing import Matched, Pairs, matched_examples
from lockstep.explain.random_layers import is_random
from lockstep.explain.replica_statistics import used_apart
from lockstep.explain.states import other_steps
from lockstep.explain.targets import why_targets
from lockstep.explain.variants import other_layers
from lockstep.numeric.arrays import (
    EPS,
    MARGIN,
    TINY,
    UNITS,
    are_finite,
    dense,
    factor_of,
    is_far,
    joined,
    norm,
    relative_distance,
    relative_norm,
)
from lockstep.reference import StepPair

KINDS_OF_OUTPUTS = ("y_pred", "y_grad")
_OF_OUTPUTS = 1e-4  # Relative to the usual size of an example's outputs.
_TELLING = 3  # Elements that are not 0, of which a common factor says something.
_CLOSE = 1e-3  # Relative; of factors that are powers of two, and of sums of outputs.
_FAR = 1e-2  # Relative; of gradients that other replicas' outputs are part of.
_MOST_WHOLE = 32  # As of lengths.
_CHANCE = 1e-4  # With which other numbers are near whole ones.
_OF_LOSS = 1e-3  # The gradient of a loss is a difference that may cancel.


DRAWS_OUTSIDE = (
    "the model or its train_step draws random numbers outside of layers, so that BatchNorm over the"
    " whole batch cannot be computed on one device: predictions and gradients are not compared"
)


def check_forward(context: Context) -> Iterator[Finding | Actual]:
    """Checks predictions, and whether they depend on the other examples of a shard."""
    if not (context.computes and context.has("y_pred")):
        return
    context.mark_checked("forward")
    known = list[Actual]()
    for shard in context.shards:
        actual = context.arrays("y_pred")[shard]
        if shard in context.exact:
            context.measure(
                "forward", "predictions", "y_pred", shard, actual[0], actual[0], 0.0, same=True
            )
            continue
        expected = context.expected(shard)
        allowed = MARGIN * expected.forward
        apart = relative_distance(actual, expected.step.y_pred)
        for got, right in zip(actual, expected.step.y_pred, strict=True):
            context.measure(
                "forward", "predictions", "y_pred", shard, got, right, allowed * norm(right)
            )
        if apart <= allowed:
            continue
        cause, text, changes = _why(context, shard, allowed)
        known.append(Actual(shard, changes))
        yield context.found(
            "forward", cause, text, kind="y_pred", items=(shard,), distance=apart, allowed=allowed,
            status=NOT_COMPARED if cause == "random_layers" else FAULT,
        )  # fmt: skip
    yield from known
    if len(context.shards) > 1:
        yield from _mixing(context.knowing(known))


def _mixing(context: Context) -> Iterator[Finding]:
    """Finds layers whose results for an example depend on the other examples of its shard."""
    oracle = context.oracle
    if not oracle.may_mix:
        return
    allowed = MARGIN * max(context.expected(shard).forward for shard in context.shards)
    if _apart(context, oracle.random_layers) <= allowed:
        return
    local = [i for i in oracle.layers_with_statistics if i not in oracle.synchronized_layers]
    statistics = [oracle.layer_names[index] for index in local]
    gradient = _gradient_apart(context)
    if statistics and _apart(context, context.modal_layers) <= allowed:
        yield context.found(
            "forward", "local_statistics",
            f"{', '.join(statistics[:3])} normalise{'s' * (len(statistics) == 1)} over each"
            " replica's examples, not over the whole batch, whose gradient differs by"
            f" {gradient:.1%}. In inference mode, shards and batch agree",
            status=BY_DESIGN, tensors=statistics, distance=gradient,
        )  # fmt: skip
    else:
        yield context.found(
            "forward", "mixes_examples",
            "the prediction for an example depends on other examples of its shard; the gradient"
            f" of the whole batch differs by {gradient:.1%}",
            status=BY_DESIGN, distance=gradient,
        )  # fmt: skip


def _apart(context: Context, off: Sequence[int]) -> float:
    """Returns the distance of predictions by shard from those of the whole batch."""
    own = context.right[0]._replace(off=tuple(off))
    shards = [own._replace(data=data) for data in context.data]
    if context.oracle.synchronized_layers:
        shards = [context.together(shards)._replace(at_once=True)]
    parts = joined([context.oracle.compute(ask).y_pred for ask in shards])
    whole = context.oracle.compute(own._replace(data=context.whole)).y_pred
    return relative_distance(parts, whole)


def _gradient_apart(context: Context) -> float:
    """Returns the distance of the shards' summed gradients from that of the whole batch."""
    if context.oracle.synchronized_layers:
        sums = context.compute(context.together(context.right)._replace(at_once=True)).raw
    else:
        sums = context.sum_by_size(state=context.state(0))
    whole = context.oracle.compute(context.right[0]._replace(data=context.whole, scales=(1, 1))).raw
    if sums.keys() != whole.keys():  # A shard overflows.
        return np.nan
    return relative_norm(sums, whole)


def _why(context: Context, shard: int, allowed: float) -> tuple[str, str, Mapping[str, Any]]:
    """Returns cause, text and changes of `Ask` that explain predictions of a shard."""
    y_pred, oracle = context.arrays("y_pred")[shard], context.oracle

    def fits(**changes: Any) -> bool:
        found = oracle.compute(context.ask(shard, **changes)).y_pred
        same = [p.shape for p in found] == [p.shape for p in y_pred]
        return same and relative_distance(y_pred, found) <= allowed

    if not are_finite(y_pred) and are_finite(context.expected(shard).step.y_pred):
        return "not_finite", "predictions are NaN or infinite, and finite on one device", {}
    if oracle.synchronized_layers and fits():
        text = (
            f"BatchNorm normalises the {context.sizes[shard]} examples of each shard separately; it"
            f" is to normalise over all {sum(context.sizes)} of the batch"
        )
        return "local_statistics", text, {}
    for cause, text, changes in other_steps(context, shard):
        if fits(**changes):
            return cause, f"the predictions are {text}", changes
    if oracle.synchronized_layers and context.draws_outside:
        return "random_layers", DRAWS_OUTSIDE, {}
    return "unexplained", "one device makes other predictions for the same examples", {}


def compare_each_example(pair: StepPair) -> Iterator[Finding]:
    """Compares examples that both traces have, if their gradients differ or are unknown."""
    step = pair.second
    if not (pair.computes_the_same and pair.has("data")):
        return
    matched = [] if pair.are_gradients_right else matched_examples(pair)
    if found := list(_other_arguments(pair, matched)):
        yield from found
        return
    for stage, kind, compare in (
        ("forward", "y_pred", _other_outputs), ("loss", "y_grad", _other_losses)
    ):  # fmt: skip
        if pair.has(kind):
            step.mark_checked(stage)
            yield from compare(pair, matched)


def _other_arguments(pair: StepPair, matched: Sequence[Matched]) -> Iterator[Finding]:
    """Compares the further arrays of examples with equal inputs, such as their targets."""
    for index in range(1, max((len(m.pairs["data"]) for m in matched), default=0)):
        own = [m for m in matched if index < len(m.pairs["data"])]
        other = [m for m in own if not np.array_equal(*m.pairs["data"][index], equal_nan=True)]
        if other:
            cause, text = why_targets(_flat(other, "data", [index]), "other_examples")
            a, b = (np.concatenate([m.pairs["data"][index][i] for m in other]) for i in (0, 1))
            if order := order_of_parts(a, b, pair.second.trace.model_axes):
                cause, text = "swapped_parts", order
            text = f"array {index + 1} of the step's batch, next to equal inputs: {text}"
            yield _found(pair, "examples", other, cause, text)


def _other_outputs(pair: StepPair, matched: Sequence[Matched]) -> Iterator[Finding]:
    """Compares outputs."""
    limit, apart = _limit(pair, _OF_OUTPUTS), [rows_apart(m.pairs["y_pred"]) for m in matched]
    wrong = [m for m, far in zip(matched, apart, strict=True) if np.any(far > limit)]
    is_port = pair.first.trace.about.framework != pair.second.trace.about.framework
    if is_port or not wrong:  # Of a port, one model may return probabilities, the other one logits.
        return
    far = np.concatenate(apart)
    text = f"the outputs of {np.sum(far > limit)} of {len(far)} examples differ"
    of_all = {m.shard for m in wrong} == {m.shard for m in matched}
    causes = [why for why in other_layers(pair) if of_all or why[0] != "local_statistics"]
    dtype = max((_computed_in(pair, m.shard) for m in wrong), key=lambda d: UNITS.get(d, 0.0))
    if not causes and limit < far.max() <= MARGIN * UNITS.get(dtype, 0.0):
        causes = [("reduced_precision", f"layers compute in {dtype}", FAULT)]
    if not causes and (equal := equal_outputs(pair, matched)):
        causes = [(*equal[:2], FAULT)]
    if not causes and (local := used_apart(pair, {m.shard for m in wrong})):
        causes = [(*local, FAULT)]
    if not causes and all(map(_is_loss, wrong)):
        causes = [("other_loss", "they are the losses of the examples", FAULT)]
    unknown = "equal weights, examples, modes and settings of layers do not give equal outputs"
    for cause, why, status in causes or [("other_outputs", unknown, FAULT)]:
        yield _found(
            pair, "forward", wrong, cause, f"{text}: {why}", status=status, distance=far.max()
        )


def _is_loss(matched: Matched) -> bool:
    """Returns whether the output is the loss of each example, whose mean or sum is minimised."""
    gradients = [each for pairs in matched.pairs["y_grad"] for each in pairs]
    return bool(gradients) and all(g.ndim == 1 and g[0] and not np.ptp(g) for g in gradients)


def _computed_in(pair: StepPair, shard: int) -> str:
    """Returns the dtype in which a replica computes, if it is not that of the reference."""
    dtype = pair.second.trace.about_of(shard).computed_in
    return dtype if dtype != pair.first.trace.about.computed_in else ""


def _other_losses(pair: StepPair, matched: Sequence[Matched]) -> Iterator[Finding]:
    """Compares targets, as far as they can be read, then gradients of the loss."""
    other = [m for m in matched if any(not np.array_equal(*each) for each in m.pairs["targets"])]
    smoothed = [m for m in matched for a, b in m.smoothings if abs(a - b) > _OF_LOSS]
    if other:
        yield _found(pair, "loss", other, *why_targets(_flat(other, "targets"), "other_targets"))
    elif smoothed and smoothed[0].pairs["targets"]:
        first, second = max(smoothed[0].smoothings, key=np.ptp)
        text = f"label smoothing of {second:.3g}, and of {first:.3g} in the first recording"
        yield _found(pair, "loss", smoothed, "label_smoothing", text)
    else:
        limit = _limit(pair, _OF_OUTPUTS)
        equal = [m for m in matched if m.pairs["y_grad"] and m.pairs["y_pred"]]
        equal = [m for m in equal if not _are_slopes(m)]
        yield from _scaled(
            pair, [m for m in equal if np.all(rows_apart(m.pairs["y_pred"]) <= limit)]
        )


def _are_slopes(matched: Matched) -> bool:
    """Returns whether a script differentiates outputs by their inputs, as for a gradient penalty.

    What the outputs have then is 1 in both recordings, and no gradient of a loss.
    """
    return all(np.all(dense(each) == 1) for pairs in matched.pairs["y_grad"] for each in pairs)


def _scaled(pair: StepPair, matched: Sequence[Matched]) -> Iterator[Finding]:
    """Compares gradients of the loss at equal outputs, up to a factor of the whole step."""
    limit = _limit(pair, _OF_LOSS)
    factors, wrong, far = _factors_of(matched, limit)
    if wrong and (found := [*_scaled_apart(pair, matched, limit)]):
        yield from found
    elif wrong and (
        why := _of_drawn_targets(pair, wrong)
        or _of_own_outputs(matched)
        or _of_other_weights(pair, matched, limit)
    ):
        yield _found(pair, "loss", wrong, *why, distance=far)
    elif wrong:
        text = (
            f"the losses of {len(wrong)} examples differ: their outputs are equal, and the"
            " gradients of the loss with respect to these are not"
        )
        cause = "other_loss"
        if agree_in_each_step(pair):
            cause = "other_backward"
            text += (
                ". The loss itself agrees: a part of its gradient is missing, as of tensors that"
                " are detached, or gathered from other replicas without a gradient"
            )
        yield _found(pair, "loss", wrong, cause, text, distance=far)
    elif _differ(factors, limit):
        # A mean over replicas divides what each of them sends.
        right = 1 / pair.second.share(0)
        usual = min(factors, key=lambda factor: abs(factor - right))
        usual = usual if abs(usual - right) <= limit * right else max(factors, key=abs)
        shown = [factor / usual for factor in factors]
        unusual = [m for m, f in zip(matched, shown, strict=True) if abs(f - 1) > limit]
        why = _why_factors(matched, shown, limit, usual / right)
        if why[0] == "scaled_gradient":
            why = _of_loss_scales(pair, matched, shown) or why
        yield _found(pair, "loss", unusual, *why)


def _factors_of(
    matched: Sequence[Matched], limit: float
) -> tuple[list[float], list[Matched], float]:
    """Returns the factor of each part, the parts of examples without it, and their distance."""
    factors, wrong, far = list[float](), list[Matched](), 0.0
    for m in matched:
        factors.append(usual_factor(m.pairs["y_grad"]))
        apart = rows_apart(m.pairs["y_grad"], factors[-1])
        wrong += [m] * int(np.sum(apart > limit))
        far = max(far, *apart)
    return factors, wrong, far


def _differ(factors: Sequence[float], limit: float) -> bool:
    return bool(factors) and max(factors) - min(factors) > limit * max(map(abs, factors))


def _scaled_apart(
    pair: StepPair, matched: Sequence[Matched], limit: float
) -> Iterator[Finding]:  # fmt: skip
    """Compares the losses of several outputs, each of which may have a factor of its own."""
    num = {len(m.pairs["y_grad"]) for m in matched} | {len(m.pairs["y_pred"]) for m in matched}
    if len(num) > 1 or max(num) < 2:
        return
    right, found = 1 / pair.second.share(0), list[Finding]()
    outputs = [
        [m._replace(pairs={kind: m.pairs[kind][i : i + 1] for kind in KINDS_OF_OUTPUTS})
         for m in matched]
        for i in range(max(num))
    ]  # fmt: skip
    for number, own in enumerate(outputs, start=1):
        factors, wrong, _ = _factors_of(own, limit)
        if wrong:
            return
        factors = [factor / right for factor in factors]
        if _differ(factors, limit):
            others = [m for each in outputs if each is not own for m in each]
            others = others if len(others) == len(own) else []
            detail, text = _why_factors(own, factors, limit, others=others)
            found.append(_found(pair, "loss", matched, detail, f"of output {number}: {text}"))
        elif abs(factors[0] - 1) > limit:
            text = f"the loss of output {number} counts {factors[0]:.6g} times"
            found.append(_found(pair, "loss", matched, "scaled_gradient", text))
    yield from found


def _why_factors(
    matched: Sequence[Matched], factors: Sequence[float], limit: float, usual: float = 1.0,
    others: Sequence[Matched] = (),
) -> tuple[str, str]:  # fmt: skip
    """Returns cause and text for parts of a step whose losses count differently.

    Args:
        matched: the parts.
        factors: how often each one counts, relative to the usual ones.
        limit: their relative error.
        usual: how often the usual ones count, relative to what is right.
        others: the same parts, with another output.
    """
    lost = {m.shard for m, factor in zip(matched, factors, strict=True) if factor == 0}
    if lost:
        kept = {m.shard for m, factor in zip(matched, factors, strict=True) if factor}
        text = f"{factors.count(0.0)} of {len(factors)} forward passes do not count in the loss"
        return "lost_micro_batch" if lost <= kept else "lost_replica", text
    listed = ", ".join(f"{factor:.4g}" for factor in factors)
    text = f"compared with the first recording, the losses of forward passes count {listed} times"
    for counts in _counts(matched):
        of_shard = collections.Counter[int]()
        for m, count in zip(matched, counts, strict=True):
            of_shard[m.shard] += count
        of_shards = [of_shard[m.shard] for m in matched]
        for which, whose in ((counts, "its own examples"), (of_shards, "its replica's examples")):
            shares = [factor * count for factor, count in zip(factors, which, strict=True)]
            if len(set(which)) > 1 and np.ptp(shares) <= limit * max(map(abs, shares)):
                return "mean_of_means", f"{text}: each is a mean over {whose} that are not masked"
    for own, other in itertools.product(_counts(matched), _counts(others)) if others else ():
        each = np.multiply(factors, own) / np.maximum(other, 1)
        if np.ptp(each) <= limit * np.max(np.abs(each)):
            whose = "its own examples, which counts as often as there are some of another output"
            return "mean_of_means", f"{text}: each is a mean over {whose}"
    # A mean over c of C examples, in one of n parts, counts C / (n · c) times as much; in a sum of
    # the means, C / c times.
    inverse = np.sum(1 / np.multiply(factors, usual)) if min(factors) > 0 else 0.0
    if min(abs(inverse - 1), abs(inverse / len(factors) - 1)) <= limit:
        return "mean_of_means", f"{text}: as means over their own sums of weights or masks"
    return "scaled_gradient", text


def _of_loss_scales(
    pair: StepPair, matched: Sequence[Matched], factors: Sequence[float]
) -> tuple[str, str] | None:
    """Explains losses that replicas multiply by numbers by which they divide the same sum."""
    step = pair.second
    scales = {m.shard: factor for m, factor in zip(matched, factors, strict=True)}
    if len(scales) < 2 or {*scales} != {*step.copies} or not step.has("clipped"):
        return None
    first = step.applied(0)
    left = [step.applied(copy) for copy in step.copies]
    names = [name for name in first if all(name in own for own in left) and norm(first[name])]
    times = [factor_of([own[n] for n in names], [first[n] for n in names]) for own in left]
    products = [scales[copy] * factor for copy, factor in zip(step.copies, times, strict=True)]
    is_undone = np.ptp(products) <= _CLOSE * max(products) and np.ptp(times) > _CLOSE * max(times)
    if not is_undone or any(
        is_far(own[n], factor * dense(first[n]), _CLOSE)
        for own, factor in zip(left, times, strict=True)
        for n in names
    ):
        return None
    listed = ", ".join(f"{scales[copy] / scales[step.copies[0]]:g}" for copy in step.copies)
    return "other_loss_scale", (
        f"the losses of the replicas have factors of {listed} to one another, and each divides the"
        " same sum by its own"
    )


def _of_own_outputs(matched: Sequence[Matched]) -> tuple[str, str] | None:
    """Explains a loss that compares outputs, as a contrastive one, those of each replica alone.

    The gradient of an output is then a sum of outputs times numbers: in the reference, not of those
    of the replica alone.
    """
    by_shard: dict[int, list[Matched]] = {}
    for m in matched:
        by_shard.setdefault(m.shard, []).append(m)
    if len(by_shard) < 2:
        return None
    for own in by_shard.values():
        rows = [dense(b) for m in own for _, b in m.pairs["y_pred"] if b.ndim == 2]
        widths = {each.shape[1] for each in rows}
        if len(widths) != 1:
            return None
        outputs = np.concatenate(rows)
        if len(outputs) >= outputs.shape[1]:
            return None  # They give any gradient.
        basis = np.linalg.qr(outputs.T)[0]
        for a, b in (pair for m in own for pair in m.pairs["y_grad"] if pair[0].ndim == 2):
            apart = [norm(g - g @ basis @ basis.T) / max(norm(g), TINY) for g in map(dense, (a, b))]
            if apart[1] > _CLOSE or apart[0] < _FAR:
                return None
    return "not_a_sum_over_examples", (
        "the gradient of each output is a sum of the outputs of its own replica alone, and in the"
        " first recording of those of others, too: the loss compares the examples of a replica"
    )


def _of_drawn_targets(pair: StepPair, wrong: Sequence[Matched]) -> tuple[str, str] | None:
    """Explains squared errors from random numbers that a script draws, as those of a diffusion."""
    pairs: Pairs = []
    for m in wrong:
        outputs, gradients = (m.pairs[kind] for kind in KINDS_OF_OUTPUTS)
        if not len(outputs) == len(gradients) == 1:
            return None
        (a, b), (of_a, of_b) = outputs[0], gradients[0]
        firsts = (drawn_targets(pair.first, shard, a, of_a) for shard in pair.first.shards)
        first = next((each for each in firsts if each is not None), None)
        second = drawn_targets(pair.second, m.shard, b, of_b)
        if first is None or second is None:
            return None
        pairs.append((first, second))
    if all(np.array_equal(*each) for each in pairs):
        return None
    cause, text = why_targets(pairs, "other_targets")
    return cause, f"targets are random numbers that the script draws: {text}"


def _of_other_weights(
    pair: StepPair, matched: Sequence[Matched], limit: float
) -> tuple[str, str] | None:
    """Explains losses that count another number of times for each example, or part of a sequence.

    The gradient of each place is then a multiple of that in the reference. It is an average over
    other axes, or has weights, if the multiples are those of numbers that are known; else, the loss
    is another function of what it is for each example.
    """
    for num in sorted({*pair.second.trace.model_axes.values()} - {1}):
        if why := _of_parts_of_sequence(matched, num, limit):
            return why
    factors, per_part = list[float](), list[np.ndarray]()
    for m in matched:
        found = _factors_of_rows(m.pairs["y_grad"], limit)
        if found is None:
            return None
        per_part.append(np.array(found))
        factors += [factor for factor in found if factor]
    if not factors or min(factors) <= 0 or np.ptp(factors) <= limit * max(factors):
        return None
    least, most = min(factors) / np.median(factors), max(factors) / np.median(factors)
    text = (
        f"the loss of each example counts a number of times of its own, {least:.3g} to {most:.3g},"
        " compared with the first recording"
    )
    if _are_of_known_numbers(matched, per_part, limit):
        return "other_loss_reduction", f"{text}: it is averaged over other axes, or weighted"
    return "other_loss", f"{text}, which are no whole numbers, recorded weights or classes"


def _are_of_known_numbers(
    matched: Sequence[Matched], factors: Sequence[np.ndarray], limit: float
) -> bool:
    """Returns whether rows are multiplied by numbers of places or weights, or by their class.

    They may be divided by them, too, and by whole numbers that are not recorded.
    """
    if any(_are_of_whole_numbers(own, limit) for own in (factors, [np.concatenate(factors)])):
        return True
    numbers = [[*_numbers_of_rows(m)] for m in matched]
    flat = np.concatenate(factors)
    for each in zip(*numbers, strict=False):
        own = np.concatenate(each)
        kept = (flat > 0) & (own > 0)
        for ratios in (flat[kept] / own[kept], flat[kept] * own[kept]):
            if len(ratios) == np.count_nonzero(flat) and np.ptp(ratios) <= limit * max(ratios):
                return True
        groups = [flat[(own == value) & (flat > 0)] for value in np.unique(own)]
        groups = [group for group in groups if len(group)]
        is_telling = 2 * len(groups) <= np.count_nonzero(flat)
        if is_telling and all(np.ptp(group) <= limit * max(group) for group in groups):
            return True
    return False


def _are_of_whole_numbers(factors: Sequence[np.ndarray], limit: float) -> bool:
    """Returns whether rows of each part are multiplied, or divided, by small whole numbers.

    Such as lengths that are not recorded. Of few rows, other numbers may be near these by chance.
    """
    for power in (1, -1):
        chance = 1.0
        for own in factors:
            ratios = np.unique(own[own > 0] ** power)
            kept = np.append(True, np.diff(ratios) > limit * ratios[1:]) if len(ratios) else ratios
            ratios = ratios[kept.astype(bool)]
            fitting = [
                n
                for n in range(1, _MOST_WHOLE + 1)
                if len(ratios)
                and np.all(np.abs((x := n * ratios / ratios[-1]) - np.round(x)) <= limit * x)
            ]
            if not fitting:
                break
            chance *= min(1.0, fitting[0] * (2 * limit * fitting[0]) ** (len(ratios) - 1))
        else:
            if chance < _CHANCE:
                return True
    return False


def _numbers_of_rows(matched: Matched) -> Iterator[np.ndarray]:
    """Yields, for each example, how many places have a loss, and what is recorded of it."""
    for which in (0, 1):
        gradients = [dense(pairs[which]) for pairs in matched.pairs["y_grad"]]
        places = [np.any(g, axis=-1) if g.ndim > 1 else g != 0 for g in gradients]
        yield np.sum([each.reshape(len(each), -1).sum(1) for each in places], axis=0)
    for kind in ("data", "targets"):
        for array, _ in matched.pairs[kind]:
            if array.ndim and array.dtype.kind in "fiub":
                rows = dense(array).reshape(len(array), -1)
                yield rows.sum(1)
                yield np.count_nonzero(rows, axis=1)


def _factors_of_rows(pairs: Pairs, limit: float) -> list[float] | None:
    """Returns for each row by what it is multiplied, 0 without a gradient; None if it is not."""
    if not pairs:
        return None
    first, second = (np.concatenate([dense(p[i]).reshape(len(p[i]), -1) for p in pairs], 1)
                     for i in (0, 1))  # fmt: skip
    found = list[float]()
    for a, b in zip(first, second, strict=True):
        if not np.any(a) and not np.any(b):
            found.append(0.0)
            continue
        factor = factor_of([b], [a])
        # Two numbers, as of two classes, may have any factor.
        if np.count_nonzero(a) < _TELLING or norm(b - factor * a) > limit * norm(b):
            return None
        found.append(factor)
    return found


def _of_parts_of_sequence(
    matched: Sequence[Matched], num: int, limit: float
) -> tuple[str, str] | None:
    """Explains losses of which each rank averages over its own part of a sequence."""
    factors, counts = list[float](), list[int]()
    for m in matched:
        for a, b in m.pairs["y_grad"]:
            if a.ndim < 3 or a.shape[1] % num:
                return None
            places = [np.split(dense(each), num, axis=1) for each in (a, b)]
            for first, second in zip(*places, strict=True):
                factor = factor_of([second], [first])
                if not factor > 0 or norm(second - factor * first) > limit * norm(second):
                    return None
                factors.append(factor)
                counts.append(int(np.count_nonzero(np.any(first, axis=-1))))
    shares = np.multiply(factors, counts)
    if len(factors) != num or len(set(counts)) < 2 or np.ptp(shares) > limit * max(shares):
        return None
    listed = ", ".join(map(str, counts))
    text = f"{num} parts of each sequence count equally, although {listed} of their places have a"
    return "mean_of_means", f"{text} loss: each rank divides by its own number"


def _counts(matched: Sequence[Matched]) -> list[tuple[int, ...]]:
    """Returns the numbers of what has a loss in each part: of elements, places, examples."""
    return [*zip(*map(_numbers_with_loss, matched), strict=True)]


def _numbers_with_loss(m: Matched) -> tuple[int, int, int, int]:
    """Returns the number of elements, of places and of examples whose loss has a gradient.

    The third number also has the places that are predicted with certainty, whose softmax leaves no
    gradient in float32, as if they were masked. Of examples that have one place, these are equal.
    """
    elements = places = certain = examples = 0
    outputs = [b for _, b in m.pairs["y_pred"]] or [b for _, b in m.pairs["y_grad"]]
    for (_, gradient), output in zip(m.pairs["y_grad"], outputs, strict=True):
        rows, own = dense(gradient), dense(output)
        size = rows.shape[-1] if rows.ndim > 1 else 1
        rows, own = rows.reshape(-1, size), own.reshape(-1, size)
        has_loss = np.any(rows, axis=1)
        with np.errstate(invalid="ignore"):
            others = np.sum(np.exp(own - own.max(axis=1, keepdims=True)), axis=1) - 1
        elements += int(np.count_nonzero(rows))
        places += int(np.count_nonzero(has_loss))
        examples += int(np.count_nonzero(np.any(dense(gradient).reshape(len(gradient), -1), 1)))
        certain += int(np.count_nonzero(has_loss | ((others < EPS) & (size > 1))))
    return elements, places, certain, examples


def _found(
    pair: StepPair, stage: str, matched: Sequence[Matched], cause: str, text: str, *,
    status: str = FAULT, distance: float = 0.0,
) -> Finding:  # fmt: skip
    """Returns a finding on the shards of some forward passes."""
    items = sorted({m.shard for m in matched})
    items = [] if items == [*pair.second.shards] else items
    return pair.second.found(
        stage, cause, text, status=status, kind="y_pred", items=items, distance=float(distance)
    )


def _limit(pair: StepPair, least: float) -> float:
    """Returns the relative difference that rounding can cause in the arrays of an example."""
    units = [UNITS.get(step.trace.about.computed_in, 0.0) for step, _ in pair.both]
    return max(least, pair.tolerance.usual, MARGIN * min(units))


def _flat(matched: Sequence[Matched], kind: str, which: Sequence[int] | None = None) -> Pairs:
    """Returns pairs of arrays with one row for each example."""
    pairs = [m.pairs[kind][i] for m in matched for i in which or range(len(m.pairs[kind]))]
    return [(a.reshape(len(a), -1), b.reshape(len(b), -1)) for a, b in pairs]


def rows_apart(pairs: Pairs, factor: float = 1.0) -> np.ndarray:
    """Returns the largest distance of each example's arrays, relative to their usual size."""
    found = [np.zeros(len(pairs[0][0]))] if pairs else [np.zeros(0)]
    for first, second in pairs:
        a, b = (dense(each).reshape(len(each), -1) for each in (first, second))
        with np.errstate(invalid="ignore"):
            far = np.linalg.norm(
                np.where(np.isfinite(a) | np.isfinite(b), b - factor * a, 0), axis=1
            )
        size = abs(factor) * np.linalg.norm(np.where(np.isfinite(a), a, 0), axis=1)
        usual = np.maximum(size, np.sqrt(np.mean(size**2)))
        found.append(np.divide(far, usual, out=np.where(far > 0, np.inf, 0.0), where=usual > 0))
    return np.max(found, axis=0)


def usual_factor(pairs: Pairs) -> float:
    """Returns the median over examples of the second array divided by the first."""
    a, b = (np.concatenate([dense(p[i]).reshape(len(p[i]), -1) for p in pairs], 1) for i in (0, 1))
    squares = np.sum(a * a, axis=1)
    used = squares > 0
    return float(np.median(np.sum(a * b, axis=1)[used] / squares[used])) if used.any() else 0.0


def other_modes(context: Context) -> Iterator[Finding]:
    """Finds layers that only some shards compute in evaluation mode."""
    trace, kinds = context.trace, context.trace.kinds
    modal = [
        str(layer.get("name"))
        for layer in trace.about.layers
        if is_random(layer) or any(kinds.get(n) == STATISTIC for n in layer.get("weights", ()))
    ]
    modes = {shard: trace.in_evaluation(context.position, shard) for shard in context.shards}
    names = [n for n in modal if 0 < sum(n in off for off in modes.values()) < len(modes)]
    if names:
        shards = [shard for shard, off in modes.items() if not off.isdisjoint(names)]
        text = (
            f"{len(names)} layers ({first_names(names)}) are in evaluation mode on these replicas,"
            " and in training mode on others"
        )
        yield context.found("forward", "inference_mode", text, items=shards)


def other_dtypes(context: Context) -> Iterator[Finding]:
    """Finds shards whose layers compute in another dtype than those of the first."""
    first, *others = [context.trace.computed_in(shard) for shard in context.shards]
    odd = [shard for shard, dtype in enumerate(others, start=1) if dtype != first]
    if odd:
        text = f"layers compute in {others[odd[0] - 1]} on these replicas, and in {first} on others"
        yield context.found("forward", "reduced_precision", text, items=odd)
