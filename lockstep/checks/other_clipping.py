"""Compares how the gradients of a step are clipped with another trace, and explains differences."""

from collections.abc import Iterator

import numpy as np

from lockstep.answer.verdict import Finding
from lockstep.arithmetic import dense, factor_of, is_far, norm, scaled_all, total_norm
from lockstep.checks.other_gradients import names_of_factor
from lockstep.context import Context
from lockstep.hypotheses.of_axes import clipped_by_local_norm, reduced_over_parts
from lockstep.reference import StepPair
from lockstep.trace import Named

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
    """Explains applied gradients that differ although the received ones are equal."""
    step, scale = pair.second, pair.second.trace.loss_scale(pair.second.position, 0)
    calls = step.trace.calls(step.position, 0)
    factors = _factor(applied, entering), _factor(pair.applied[0], pair.gradients[0])
    limits = [limits_of(each) for each in (step, pair.first)]
    if scale != 1 and limits[0] and "unscale" not in calls[: calls.index(f"clip {limits[0][0]}")]:
        scaled = _clipped(limits[0], scaled_all(entering, scale))
        if any(_are_near(applied, scaled_all(scaled, 1 / by)) for by in (scale, 1)):
            text = f"gradients are clipped ({', '.join(limits[0])}) before unscale_: they are then"
            return "clipped_before_unscale", f"{text} multiplied by the loss scale, {scale:g}"
    if scale != 1 and abs(factors[0] - scale) <= _CLOSE * scale and "unscale" not in calls:
        return "loss_scale_left", f"the update has gradients times the loss scale, {scale:g}"
    if why := _by_parts(step, entering, applied, factors[1]) or clipped_by_local_norm(pair):
        return why
    if why := reduced_over_parts(pair) or _of_previous_step(pair, applied):
        return why
    factor_before = _factor(pair.matching.to_first(step.entering(0)), entering) if calls else 1.0
    if limits[0] == limits[1] and all(factors):
        # Whether the script multiplies them before or after it clips them.
        times, when = factors[0] / factors[1], f"after clipping to {', '.join(limits[0])}"
        if limits[0] and abs(factor_before - 1) > _CLOSE and factor_before:
            times, when = factor_before, "before clipping"
        if not limits[0]:
            when = "after the backward pass"
        known = names_of_factor(pair, times) if calls else []
        known.sort(key=lambda each: each[0] == "micro_batches_not_averaged")  # The loss is right.
        if limits[0] or known:
            text = f"{when}, gradients are multiplied by {times:.6g}"
            cause, reason = next(iter(known), ("scaled_gradient", ""))
            if limits[0] and not known and step.trace.model_axes:
                cause, reason = "other_clipping", "as by the norm of other gradients"
            return cause, f"{text}: {reason}" if reason else text
    texts = [
        f"multiplied by {_shown(own, sent)} (to norm {total_norm(own):.4g})"
        for sent, own in zip(pair.gradients, pair.applied, strict=True)
    ]
    text = f"gradients are {texts[0]} in the first recording and {texts[1]} in the second"
    return "other_clipping", text


def _of_previous_step(pair: StepPair, applied: Named) -> tuple[str, str] | None:
    """Explains applied gradients of some weights by those of the previous step."""
    before, wrong = pair.second.previous, [*pair.tolerance.wrong(applied, pair.applied[0])]
    old = pair.matching.to_first(before.entering(0)) if before else {}
    names = [name for name in wrong if name in old]
    factor = factor_of([applied[n] for n in names], [old[n] for n in names])
    is_old = not any(is_far(applied[n], factor * dense(old[n]), _CLOSE) for n in names)
    if len(names) < len(wrong) or not (factor > 0 and is_old):
        return None
    text = f"the gradients of {len(names)} weights that are applied are those of the previous step"
    return "stale_gradient", text


def _clipped(limits: list[str], gradients: Named) -> Named:
    """Returns gradients after clipping; see `limits_of`."""
    for limit in limits:
        kind, number = limit.split()[0], float(limit.split()[-1])
        if kind == "value":
            gradients = {n: np.clip(dense(g), -number, number) for n, g in gradients.items()}
        else:
            size = total_norm(gradients)
            gradients = scaled_all(gradients, min(1.0, number / size) if size else 1.0)
    return gradients


def _are_near(actual: Named, expected: Named) -> bool:
    return not any(is_far(actual[name], expected[name], _CLOSE) for name in actual)


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


def _by_parts(step: Context, sent: Named, applied: Named, usual: float) -> tuple[str, str] | None:
    """Explains sharded gradients of which the replicas multiply their own rows differently."""
    num = step.trace.about.num_replicas
    if num < 2 or step.has("raw"):
        return None
    factors: list[float] = []
    for rank in range(num):
        rows = [(_rows(applied[n], rank, num), _rows(sent[n], rank, num)) for n in applied]
        pairs = [(a, s) for a, s in rows if norm(s)]
        factor = factor_of([a for a, _ in pairs], [s for _, s in pairs])
        if not factor > 0 or any(is_far(a, factor * s, _CLOSE) for a, s in pairs):
            return None
        factors.append(factor)
    if np.ptp(factors) <= _CLOSE * max(factors):
        return None
    listed = ", ".join(f"{factor:.4g}" for factor in factors)
    text = f"the replicas multiply their own rows of the weights by {listed}"
    if any(abs(factor - usual) <= _CLOSE * usual for factor in factors):
        return "clipped_on_one_replica", f"{text}, and the first recording by {usual:.4g}"
    return "clipped_before_the_sum", f"{text}: each clips its part on its own"


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
