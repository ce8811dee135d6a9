"""Checks moving statistics and seeds after the step."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.answer.text import count
from lockstep.answer.verdict import BY_DESIGN, FAULT, NOT_COMPARED, Finding
from lockstep.context import Context
from lockstep.data.trace import SEED, STATISTIC
from lockstep.explain.averages import why_averages
from lockstep.explain.rows import explained_apart
from lockstep.numeric.arrays import (
    EPS,
    MARGIN,
    TINY,
    Array,
    Named,
    dense,
    distance,
    factor_of,
    farthest,
    fitted,
    is_far,
    is_within,
    length,
    norm,
    ratio,
    same_bits,
    sum_bound,
)
from lockstep.reference import StepPair
from lockstep.stages.forward import other_dtypes, other_modes

_CLOSE = 1e-4
_OTHER_SHARE = 1e-3  # Momentum settings are short numbers.


def check_statistics(context: Context) -> Iterator[Finding]:
    """Checks moving statistics and seeds of each shard, and their averages."""
    yield from other_modes(context)
    yield from other_dtypes(context)
    names = context.of_kind(STATISTIC, SEED)
    if not names or not context.has("after"):
        return
    if context.computes:
        context.mark_checked("statistics")
        for shard in context.shards:
            if shard not in context.exact:
                yield from _of_shard(context, shard, names)
    elif len(context.copies) > 1 and context.of_kind(STATISTIC):
        context.mark_checked("statistics")
        yield from _local(context)
    if context.has("own_after"):
        context.mark_checked("statistics")
        yield from _averages(context)


def _local(context: Context) -> Iterator[Finding]:
    """Finds moving statistics that differ between copies, where no oracle computes them."""
    layers = {name: x for x in context.trace.about.layers for name in x.get("weights", ())}
    kinds = ("before", "after") if context.trace.mesh and context.has("before") else ()
    states = [*zip(*map(context.named, kinds), strict=True)]
    for name, copies, apart in context.unlike_first("after"):
        own = [(b[name], a[name]) for b, a in states if name in b and name in a]
        is_constant = bool(own) and all(same_bits(before, after) for before, after in own)
        if context.trace.kinds[name] != STATISTIC or is_constant:  # Such as a rank's positions.
            continue
        if not is_of_norm(layers.get(name)):
            continue  # The claim compares it with the reference; nothing makes it local by design.
        text = (
            "each replica normalises its own examples and has moving statistics that differ from"
            " those of replica 0"
        )
        layer, status = layers.get(name, {}), BY_DESIGN
        if "Sync" in str(layer.get("class")) or layer.get("synchronized"):
            if not _are_of_groups([each[name] for each in context.named("after")]):
                status = FAULT
            text = (
                f"{layer.get('name')} is synchronised, but its moving statistics differ from those"
                " of replica 0"
            )
        yield context.found(
            "statistics", "local_statistics", text, status=status, kind="after", items=copies,
            tensors=(name,), distance=apart,
        )  # fmt: skip


def is_of_norm(layer: Mapping[str, Any] | None) -> bool:
    """Returns whether a layer normalises the examples of a batch, or is unknown."""
    return layer is None or "norm" in str(layer.get("class")).lower()


def _are_of_groups(values: Sequence[Array]) -> bool:
    """Returns whether each copy shares its value with another one."""
    return all(sum(same_bits(value, other) for other in values) > 1 for value in values)


def _of_shard(context: Context, shard: int, names: Sequence[str]) -> Iterator[Finding]:
    """Checks the statistics and seeds that a shard leaves."""
    left, before = context.state(shard, "after"), context.state(shard)
    own = _own(context, shard)
    expected = context.expected(shard)
    allowed = MARGIN * expected.forward
    wrong = []
    for name in names:
        if name not in left or name not in own:
            continue
        same = same_bits(left[name], own[name])
        limit = 0.0
        if context.trace.kinds[name] != SEED:
            far = MARGIN * expected.statistics.get(name, 0.0)
            limit = max(far, allowed * norm(own[name])) + TINY
        if not context.measure(
            "statistics", name, "own_after", shard, left[name], own[name], limit, same=same
        ):
            wrong.append(name)
    if not wrong:
        return
    stay = all(same_bits(left[name], before[name]) for name in wrong)
    if stay and context.actual[shard].off:
        return
    apart = farthest(left, own, wrong)
    where: Any = {"items": (shard,), "tensors": wrong, "distance": apart, "allowed": allowed}
    if stay:
        text = "moving statistics and seeds do not change in the training step"
        yield context.found("statistics", "inference_mode", text, **where)
        return
    cause, text = _why(context, shard, left, before, own, wrong)
    if any(finding.detail == "random_layers" for finding in context.findings):
        return
    yield context.found("statistics", cause, text, **where)


def _own(context: Context, shard: int) -> Named:
    """Returns the variables that a shard should leave, given the state that it computes with."""
    ask, right = context.actual[shard], context.right[shard]
    if ask.state is right.state and ask.data is right.data:
        return context.expected(shard).step.after
    state = ask.state | context.seeds(shard)
    return context.oracle.compute(ask._replace(state=state, off=())).after


def _why(
    context: Context, shard: int, left: Named, before: Named, own: Named, wrong: Sequence[str]
) -> tuple[str, str]:
    """Explains statistics by known ways to average wrongly."""
    allowed = MARGIN * context.expected(shard).forward

    def fits(predicted: Named, times: float = 1.0) -> bool:
        limit = allowed * max(1.0, times)
        return all(n in predicted and not is_far(left[n], predicted[n], limit) for n in wrong)

    change = {n: dense(own[n]) - dense(before[n]) for n in wrong}
    again = context.oracle.compute(context.ask(shard, state=context.state(shard) | own)).after
    if fits(again) or fits({n: dense(own[n]) + change[n] for n in wrong}):
        return "doubled_average", "moving statistics change twice as much as they should"
    ask, replica = context.ask(shard), context.trace.replica_of(shard)
    if context.oracle.synchronized_layers and fits(context.oracle.compute(ask).after):
        return "local_statistics", (
            "the layer is synchronized, but its moving statistics are those of one replica's"
            " examples, not of the whole batch"
        )
    together = [s for s in context.shards if context.trace.replica_of(s) == replica]
    for other in together if len(together) > 1 else ():
        ask = context.ask(other, state=ask.state)
        ask = ask._replace(state=context.oracle.compute(ask).after)
    if len(together) > 1 and fits(ask.state):
        return "doubled_average", "all micro-batches of the replica update these statistics"
    if context.oracle.layers_with_statistics and len(context.shards) > 1:
        whole = context.oracle.compute(context.ask(shard, data=context.whole, starts=None))
        if fits(whole.after):
            return "whole_batch_norm", "BatchNorm normalises over the whole batch, not each shard"
    for other in context.shards:
        if other != shard and fits(_own(context, other)):
            name = context.trace.name_of("own_after", other)
            return "same_examples", f"moving statistics are those of {name}"
    num = context.sizes[shard]
    if num > 1:
        for factor, what in ((num / (num - 1), "n / (n - 1)"), ((num - 1) / num, "(n - 1) / n")):
            if fits({n: dense(before[n]) + factor * change[n] for n in wrong}):
                return "wrong_count", f"moving statistics are those of a count that is {what} off"
    moved = [dense(left[n]) - dense(before[n]) for n in wrong]
    times = factor_of(moved, [change[n] for n in wrong])
    by_share = {n: dense(before[n]) + times * change[n] for n in wrong}
    if np.isfinite(times) and fits(by_share, times):  # With that of its rounding.
        text = f"moving statistics change {times:.4g} times as much as they should"
        return "other_batch_norm_momentum", text
    times, by_count = _of_other_count(left, before, own, wrong)
    if times > 0 and fits(by_count, times):
        return "wrong_count", f"the statistics of the batch count {times:.4g} times, not once"
    return (
        "unexplained",
        "moving statistics or seeds differ from those of one device for the replica's examples",
    )


def _of_other_count(
    left: Named, before: Named, own: Named, wrong: Sequence[str]
) -> tuple[float, Named]:
    """Returns how often a batch counts in moving statistics, and what these are then; 0 if unknown.

    A batch adds own - m * before, with a momentum m that fits; so that the right statistics and
    those before have two factors, which are solved.
    """
    terms = [np.concatenate([dense(s[n]).ravel() for n in wrong]) for s in (own, before, left)]
    if np.count_nonzero(terms[2]) < 4:
        return 0.0, {}
    (times, kept), *_ = np.linalg.lstsq(np.stack(terms[:2], axis=1), terms[2], rcond=None)
    # With a momentum of 0, it is a factor of the whole.
    is_momentum = abs(times - 1) > _CLOSE and _CLOSE < kept / (1 - times) <= 1
    counted = {n: times * dense(own[n]) + kept * dense(before[n]) for n in wrong}
    return (float(times), counted) if is_momentum else (0.0, {})


def _averages(context: Context) -> Iterator[Finding]:
    """Checks the statistics that are evaluated and saved: the mean over the shards."""
    own, saved = context.named("own_after"), context.named("after")[0]
    wrong: list[str] = []
    for name in context.of_kind(STATISTIC):
        if not all(name in each for each in (*own, saved)):
            continue
        mean, bound = _average(own, name, [1 / len(own)] * len(own))
        same = same_bits(saved[name], np.mean([each[name] for each in own], axis=0))
        context.measure("statistics", name, "after", 0, saved[name], mean, length(bound), same=same)
        if not same and not is_within(saved[name], mean, bound):
            wrong.append(name)
    why = functools.partial(_why_average, context, own, saved, wrong)
    for row, names, _ in explained_apart(wrong, why):
        yield context.found("statistics", row.detail, row.text, kind="after", tensors=names)


def _average(
    own: Sequence[Named], name: str, weights: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a weighted sum of the shards' statistics, and the bound of its error."""
    parts = [weight * dense(each[name]) for weight, each in zip(weights, own, strict=True)]
    return np.sum(parts, axis=0), sum_bound(parts)


def _why_average(
    context: Context, own: Sequence[Named], saved: Named, wrong: Sequence[str], name: str
) -> tuple[str, str]:
    """Explains moving statistics that are not the mean over the shards."""
    num = len(own)
    for shard in range(num):
        if is_within(saved[name], *_average(own, name, np.eye(num)[shard].tolist())):
            shown = context.trace.name_of("own_after", shard)
            return "statistics_not_averaged", (
                f"BatchNorm's moving statistics are not averaged: those of {shown} are evaluated"
                " and saved"
            )
    columns = [np.concatenate([dense(each[n]).ravel() for n in wrong]) for each in own]
    target = np.concatenate([dense(saved[n]).ravel() for n in wrong])
    # Each equation in units of its rounding error: means are small beside variances.
    unit = np.concatenate([_average(own, n, [1 / num] * num)[1].ravel() for n in wrong])
    system = np.stack(columns, axis=1) / unit[:, None]
    factors = fitted(system, target / unit).tolist()
    sizes = context.sizes if context.has("data") else [1] * num
    known = {
        "weighted_average": [size / sum(sizes) for size in sizes],
        "doubled_average": [1.0] * num,
    }
    for cause, weights in known.items():
        if is_within(saved[name], *_average(own, name, weights)):
            how = "summed, not averaged"
            if cause == "weighted_average":
                how = "averaged with weights, by the size of the shards"
            return cause, f"moving statistics are {how}"
    # Statistics of shards are alike: their weights are known to a few digits.
    mean, bound = _average(own, name, factors)
    if len(target) > 2 * num and is_within(saved[name], mean, MARGIN * bound):
        shown = ", ".join(f"{weight:.3g}" for weight in factors)
        return "weighted_average", f"moving statistics are averaged with the weights {shown}"
    return "unexplained", "moving statistics are not the mean over the replicas"


def compare_statistics(pair: StepPair) -> Iterator[Finding]:
    """Compares the statistics after a step that starts from equal ones."""
    before, (first, second) = pair.states("before")[0], pair.ends
    names = [n for n in pair.first.of_kind(STATISTIC) if n in before and n in second]
    names = [name for name in names if before[name].dtype.kind == "f"]
    if not (names and pair.computes_the_same):
        return
    pair.second.mark_checked("statistics")
    changes = [{n: dense(after[n]) - dense(before[n]) for n in names} for after in (first, second)]
    far = {n: ratio(distance(changes[1][n], changes[0][n]), norm(changes[0][n])) for n in names}
    for finding in _why_statistics(pair, before, *changes):
        apart = max(far[name] for name in finding.tensors)
        yield dataclasses.replace(finding, distance=apart, allowed=pair.tolerance.of_batch)


def _why_statistics(
    pair: StepPair, before: Named, first: Named, second: Named
) -> Iterator[Finding]:
    """Explains different changes of statistics.

    Args:
        pair: the step.
        before: the statistics before it.
        first, second: the changes of all statistics in both traces.
    """
    found, allowed = pair.second.found, max(pair.tolerance.of_batch, _CLOSE)
    others: dict[str, tuple[float, float]] = {}  # Different shares of a batch in the average.
    batches: dict[str, tuple[Array, Array, float]] = {}  # Of both; difference by rounding.
    for name, own in first.items():
        other, old = second[name], dense(before[name])
        shares = _share(pair.first, name), _share(pair.second, pair.in_second(name))
        if not all(shares):
            shares = 1.0, 1.0
        rounding = MARGIN * EPS * (norm(old) + max(norm(own), norm(other))) + TINY
        if abs(shares[1] - shares[0]) > _OTHER_SHARE * shares[0] and norm(other - own) > rounding:
            others[name] = shares
        batches[name] = old + own / shares[0], old + other / shares[1], rounding / min(shares)
    if others:
        shares = next(iter(others.values()))
        text = (
            f"{shares[0]:.4g} of each batch is added to the moving statistics in the first"
            f" recording, and {shares[1]:.4g} in the second"
        )
        yield found("statistics", "other_batch_norm_momentum", text, tensors=others)
    left = [n for n, (a, b, by) in batches.items() if distance(b, a) > allowed * norm(a) + by]
    means = {_layer_of(name) for name in left if not _is_variance(name)}
    # If the mean of a layer differs, its batch differs.
    variances = [n for n in left if _is_variance(n) and _layer_of(n) not in means]
    if text := _unbiased(pair, [batches[name] for name in variances]):
        frameworks = {step.trace.about.framework for step, _ in pair.both}
        # Each framework has its own form.
        status = BY_DESIGN if len(frameworks) > 1 else FAULT
        yield found("statistics", "unbiased_variance", text, tensors=variances, status=status)
        left = [name for name in left if name not in variances]
    if not left:
        return
    yield from _why_left(pair, first, second, left, is_share=bool(others))


def _why_left(
    pair: StepPair, first: Named, second: Named, left: Sequence[str], *, is_share: bool
) -> Iterator[Finding]:
    """Explains statistics whose batches differ.

    Args:
        pair: the step.
        first, second: the changes of all statistics in both traces.
        left: names of those that differ.
        is_share: whether another share of a batch explains some.
    """
    found, left = pair.second.found, [*left]
    for cause, text, names in why_averages(pair, left):
        yield found("statistics", cause, text, tensors=names)
        left = [name for name in left if name not in names]
    if not left or {*map(pair.in_second, left)} <= _synchronised_apart(pair.second):
        return
    of_norm = [name for name in left if _is_of_norm(pair.first, name)]
    scale = factor_of([second[n] for n in left], [first[n] for n in left])
    scaled = {name: scale * first[name] for name in left}
    is_scaled = abs(scale - 1) > _OTHER_SHARE and not any(
        is_far(second[name], change, _CLOSE) for name, change in scaled.items()
    )
    if is_scaled and not scale:
        text = f"{count('moving statistic', len(left))} do not change"
        yield found("statistics", "not_updated", text, tensors=left)
        return
    if is_scaled and not is_share and of_norm == left:
        text = f"each statistic changes {scale:.4g} times as much as in the first recording"
        yield found("statistics", "other_batch_norm_momentum", text, tensors=left)
        return
    for step, which in pair.both if of_norm == left and not pair.has_same_shards else ():
        names, after = step.of_kind(STATISTIC), step.named("after")
        if any(not same_bits(after[0][n], other[n]) for other in after[1:] for n in names):
            text = f"each replica of the {which} recording has the statistics of its own examples"
            is_fault = _normalises_all(pair, left)
            if is_fault:
                text += ", and gradients are those of layers that normalise the whole batch"
            status = FAULT if is_fault else NOT_COMPARED
            yield found("statistics", "local_statistics", text, tensors=left, status=status)
            return
    if averaged := _only_as_mean(pair, left):
        text = "each replica has its own, and their mean is right"
        yield found("statistics", "statistics_not_averaged", text, tensors=averaged)
    left = [name for name in left if name not in averaged]
    of_copies = {name for name, *_ in pair.second.unlike_first("after")}
    apart = [name for name in left if pair.in_second(name) in of_copies]
    if left:
        text, detail = f"{len(left)} moving statistics differ", "other_statistics"
        if apart == left:
            text, detail = f"{text}, and each replica has its own", "diverged_replicas"
        yield pair.explained(found("statistics", detail, text, tensors=left))


def _synchronised_apart(step: Context) -> set[str]:
    """Returns the statistics of synchronised layers that are known to differ between replicas."""
    known = [f for f in step.findings if (f.detail, f.status) == ("local_statistics", FAULT)]
    return {name for finding in known for name in finding.tensors}


def _only_as_mean(pair: StepPair, names: Sequence[str]) -> list[str]:
    """Returns the statistics that differ between copies, and whose mean is the reference's."""
    before = pair.first.named("before")[0]
    copies = [pair.matching.to_first(own) for own in pair.second.ends]
    allowed, found = max(pair.tolerance.of_batch, _CLOSE), []
    for name in names:
        own = [dense(each[name]) for each in copies if name in each]
        if len(own) < len(copies) or not any(np.any(each != own[0]) for each in own[1:]):
            continue
        right = dense(pair.first.ends[0][name])
        apart = distance(np.mean(own, axis=0), right)
        if apart <= allowed * distance(right, before[name]) + MARGIN * EPS * norm(right):
            found.append(name)
    return found


def _normalises_all(pair: StepPair, names: Sequence[str]) -> bool:
    """Returns whether gradients show that statistics of other replicas are known to each one.

    Of a trace without layers, nothing else tells whether BatchNorm is synchronised.
    """
    last = [name.replace("/", ".").split(".")[-1].lower() for name in names]
    is_norm = all("mean" in name or "var" in name for name in last)
    is_known = not pair.second.trace.about.layers
    return bool(is_norm and is_known) and pair.are_gradients_right


def _is_of_norm(step: Context, name: str) -> bool:
    """Returns whether a statistic belongs to a layer that normalises, or to an unknown one."""
    layers = [layer for layer in step.trace.about.layers if name in layer.get("weights", ())]
    return is_of_norm(layers[0] if layers else None)


def _share(step: Context, name: str) -> float:
    """Returns the weight with which the statistic of a batch is added; 0 if it is unknown.

    It is 0.1 for a momentum of 0.1 in PyTorch and of 0.9 in Keras.
    """
    layers = [layer for layer in step.trace.about.layers if "BatchNorm" in str(layer.get("class"))]
    own = [layer for layer in layers if name in layer.get("weights", ())]
    for layer in own or layers:
        if isinstance(momentum := layer.get("momentum"), float):
            return max(0.0, 1 - momentum if layer["class"] == "BatchNormalization" else momentum)
    return 0.0


def _is_variance(name: str) -> bool:
    return "var" in name.replace("/", ".").split(".")[-1].lower()


def _layer_of(name: str) -> str:
    return name.replace("/", ".").rpartition(".")[0]


def _unbiased(pair: StepPair, variances: Sequence[tuple[Array, Array, float]]) -> str:
    """Explains variances by n / (n - 1); n is at least the number of examples.

    Args:
        pair: the step.
        variances: variances of a batch in both traces, and the difference that rounding can cause.
    """
    times = []
    for first, second, slack in variances:
        factor = factor_of([second], [first])
        allowed = 20 * _CLOSE * norm(second) + slack
        if not factor > 0 or distance(second, factor * first) > allowed:
            return ""
        times.append(max(factor, 1 / factor))
    smallest = max(2, min(size for step, _ in pair.both for size in step.sizes))
    if not times or max(times) > smallest / (smallest - 1) * 1.01:
        return ""
    first, second, _ = variances[int(np.argmax(times))]
    return (
        f"the variance of a batch is up to {max(times):.6g} times as large in the"
        f" {'second' if norm(second) > norm(first) else 'first'} recording: n / (n - 1), the"
        " unbiased one"
    )
