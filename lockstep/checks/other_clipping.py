"""Compares how the gradients of a step are clipped with another trace, and explains differences."""

from collections.abc import Iterator

import numpy as np

from lockstep.arithmetic import dense, factor_of, is_far, norm, scaled_all, total_norm
from lockstep.checks.other_gradients import names_of_factor
from lockstep.context import Context
from lockstep.reference import StepPair
from lockstep.trace import Named
from lockstep.verdict import Finding

_CLOSE = 1e-3  # Relative deviation of factors and norms; limits are short numbers.


def compare_clipping(pair: StepPair) -> Iterator[Finding]:
    """Compares the gradients that the optimizers apply, or only the limits if they must differ."""
    step = pair.second
    if step.is_wrong("all-reduce", "clipping") or not (pair.computes_the_same and pair.applied[0]):
        return
    if pair.found_in("gradients"):
        yield from _other_limits(pair)
        return
    if not pair.gradients[0]:
        return
    step.mark_checked()
    if far := pair.tolerance.wrong(pair.applied[1], pair.applied[0]):
        entering, applied = pair.gradients[1], pair.applied[1]
        cause, text = _why(pair, entering, applied)
        yield step.found(cause, text, distance=max(far.values()))


def _why(pair: StepPair, entering: Named, applied: Named) -> tuple[str, str]:
    """Explains applied gradients that differ although they are equal before clipping."""
    step, scale = pair.second, pair.second.trace.loss_scale(pair.second.position, 0)
    factors = _factor(applied, entering), _factor(pair.applied[0], pair.gradients[0])
    limits = [limits_of(each) for each in (step, pair.first)]
    if scale != 1 and limits[0] and factors[0]:
        calls = step.trace.calls(step.position, 0)
        clip = next(i for i, call in enumerate(calls) if call.startswith("clip"))
        is_scaled = "unscale" not in calls[:clip]
        if is_scaled and _is_clipped_to(limits[0], applied, scaled_all(entering, scale), scale):
            return "clipped_before_unscale", (
                f"gradients are clipped ({', '.join(limits[0])}) while they are multiplied by the"
                f" loss scale {scale:g}: they are multiplied by {factors[0]:.6g}, and by"
                f" {factors[1]:.6g} in the first recording"
            )
    is_left = scale != 1 and abs(factors[0] - scale) <= _CLOSE * scale
    if is_left and "unscale" not in step.trace.calls(step.position, 0):
        return "loss_scale_left", f"the update has gradients times the loss scale, {scale:g}"
    if text := _by_parts(step, entering, applied):
        return "clipped_before_the_sum", text
    if limits[0] == limits[1] and all(factors):
        times = factors[0] / factors[1]
        is_known = bool(step.trace.calls(step.position, 0))  # And nothing else clips.
        known = names_of_factor(pair, times) if is_known else []
        known.sort(key=lambda each: each[0] == "micro_batches_not_averaged")  # The loss is right.
        if limits[0] or known:
            after = f"clipping to {', '.join(limits[0])}" if limits[0] else "the backward pass"
            text = f"after {after}, which is the same, gradients are multiplied by {times:.6g}"
            cause, why = next(iter(known), ("scaled_gradient", ""))
            return cause, f"{text}: {why}" if why else text
    texts = [
        f"multiplied by {_shown(own, sent)} (to norm {total_norm(own):.4g})"
        for sent, own in zip(pair.gradients, pair.applied, strict=True)
    ]
    text = f"gradients are {texts[0]} in the first recording and {texts[1]} in the second"
    return "other_clipping", text


def limits_of(step: Context) -> list[str]:
    """Returns how gradients are clipped after the last backward pass; empty if unknown or not."""
    calls = list(step.trace.calls(step.position, 0))
    passes = [i for i, call in enumerate(calls) if call.startswith("backward")]
    last = calls[passes[-1] :] if passes else []
    return [call.removeprefix("clip ") for call in last if call.startswith("clip ")]


def _shown(applied: Named, sent: Named) -> str:
    names = [name for name in applied if name in sent]
    return f"{factor_of([applied[n] for n in names], [sent[n] for n in names]):.6g}"


def _factor(applied: Named, sent: Named) -> float:
    """Returns the factor of all gradients; 0 if they do not have one."""
    names = [name for name in applied if name in sent and norm(sent[name])]
    factor = factor_of([applied[n] for n in names], [sent[n] for n in names])
    is_common = not any(is_far(applied[n], factor * dense(sent[n]), _CLOSE) for n in names)
    return factor if names and is_common else 0.0


def _is_clipped_to(limits: list[str], applied: Named, sent: Named, scale: float) -> bool:
    """Returns whether gradients have the norm of a limit, divided by the loss scale or not."""
    wanted = [float(x.split()[-1]) for x in limits if x.startswith("norm")]
    size = total_norm(applied)
    expected = [min(limit, total_norm(sent)) / by for limit in wanted for by in (1, scale)]
    return any(abs(size - each) <= _CLOSE * each for each in expected)


def _by_parts(step: Context, sent: Named, applied: Named) -> str:
    """Explains sharded gradients of which each replica clips its own rows; "" if none does."""
    num = step.trace.about.num_replicas
    if num < 2 or step.has("raw"):
        return ""
    factors: list[float] = []
    for rank in range(num):
        parts = [(_rows(applied[n], rank, num), _rows(sent[n], rank, num)) for n in applied]
        parts = [(a, s) for a, s in parts if norm(s)]
        factor = factor_of(*map(list, zip(*parts, strict=True))) if parts else np.nan
        if not factor > 0 or any(is_far(a, factor * s, _CLOSE) for a, s in parts):
            return ""
        factors.append(factor)
    if max(factors) - min(factors) <= _CLOSE * max(factors):
        return ""
    listed = ", ".join(f"{factor:.4g}" for factor in factors)
    return f"each replica clips its own rows of the weights: the parts are multiplied by {listed}"


def _rows(value: Named, rank: int, num: int) -> np.ndarray:
    """Returns the rows of a weight that `fully_shard` gives to a rank."""
    array = np.atleast_1d(dense(value))
    size = -(-len(array) // num)
    return array[rank * size : (rank + 1) * size]


def _other_limits(pair: StepPair) -> Iterator[Finding]:
    """Compares the norms to which gradients are clipped, where the gradients differ."""
    matching = pair.matching
    if matching.unmatched_first or matching.unmatched_second:
        return  # The norm is that of all weights.
    entering = pair.first.entering(0), matching.to_first(pair.second.entering(0))
    factors = [_factor(*each) for each in zip(pair.applied, entering, strict=True)]
    norms = [total_norm(applied) for applied in pair.applied]
    if not all(0 < factor < 1 + _CLOSE for factor in factors):
        return
    is_clipped = [factor < 1 - _CLOSE for factor in factors]
    least = min(
        (n for n, clipped in zip(norms, is_clipped, strict=True) if clipped), default=np.inf
    )
    if max(norms) <= (1 + _CLOSE) * least:
        return
    pair.second.mark_checked()
    first, second = (
        f"clipped to norm {size:.4g}" if clipped else f"not clipped (norm {size:.4g})"
        for size, clipped in zip(norms, is_clipped, strict=True)
    )
    text = f"gradients are {first} in the first recording and {second} in the second"
    yield pair.second.found("other_clipping", text)
