"""The bounds of a reference: of its gradients, of sums of recorded arrays, of outputs.

The bound of gradients is that of `numeric.tolerance`, which has its derivation. It is constructed
once for a training from the reference and its recording with permuted examples, and once for a
step from the size of the batch, its layers and what is summed. Nothing changes it later.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from lockstep.data.match import Matching
from lockstep.data.trace import WEIGHT, Trace
from lockstep.engine.pair import Pair, has_batch_norms, norm_of
from lockstep.engine.step import Step
from lockstep.numeric.arrays import (
    EPS,
    MARGIN,
    TINY,
    UNITS,
    Named,
    distance,
    norm,
    norm_in,
    ratio,
    same_values,
    stored,
    unit_of,
    wide,
)
from lockstep.numeric.tolerance import (
    IN_16_BITS,
    IN_TF32,
    OF_LARGEST,
    TIES,
    TIES_ALONE,
    WITH_SPREAD,
    WITHOUT_SPREAD,
    ZERO,
    Expression,
    Tolerance,
    gap_of,
    size_of,
)

# Fewer elements may have short mantissas by chance: each of 16 does with a chance of 2^-16.
ELEMENTS_OF_DTYPE = 16
# Kernels for batches of another size differ by less than 256 roundings of float32.
ROUNDING_OF_OUTPUTS = 3e-5
# PyTorch divides by the norm plus this.
IN_CLIPPING = 1e-6
# Parts that cancel to less than a hundredth of their size are rounding alone: no bound helps.
MOST_CANCELLED = 100
# What is solved from rounded numbers has their errors and those of the solution.
OF_SOLUTION = 2
# A sum of recorded arrays: its own rounding, and that of an all-reduce over up to 16 ranks.
OF_REDUCTION = 16


# Observed arrays, a sum of terms, and names → name → distance of an array from it over its bound.
Bound = Callable[[Named, Expression, Sequence[str]], dict[str, float]]


# --- Of gradients ---------------------------------------------------------------------------------


def bound_of(reference: Trace, permuted: Trace | None, given: float | None = None) -> Tolerance:
    """Returns the bound of a reference's gradients.

    Args:
        reference: the reference.
        permuted: a recording of it with permuted examples.
        given: relative difference that a user allows; None to compute it.
    """
    if given is not None:
        return Tolerance(f"{given:g}, given by --tolerance", given=given)
    unit, dtype = _unit_of(reference)
    pairs = _permuted_pairs(reference, permuted) if permuted else []
    spread, moved = _spread(pairs), functools.cache(functools.partial(_moved, pairs))
    has_norms = has_batch_norms(Step(reference, 0))
    if dtype == "tensorfloat32":
        text = "tensorfloat32 (float32 if NVIDIA_TF32_OVERRIDE=0 is set for both trainings)"
        bound = Tolerance("", IN_TF32, unit)
    elif unit > EPS:
        text = dtype
        times = 2 * IN_16_BITS if has_norms else IN_16_BITS
        bound = Tolerance("", times, unit, of_largest=1.0 if has_norms else OF_LARGEST)
        if far := _beyond(bound, pairs):  # Sums over examples are accumulated in 16 bits.
            spread = {name: spread[name] for name in far}
            bound = dataclasses.replace(bound, spread=spread, moved=moved)
    else:
        text = "float32"
        bound = Tolerance("", WITH_SPREAD if spread else WITHOUT_SPREAD, unit, spread, moved=moved)
        if not spread:
            text += ", by the size of the batch"
        if not (spread or reference.has(0, "shards")):  # One by parts is not permuted.
            text += (
                "; record the reference with permute=1, too, to compute it from the effect of"
                " rounding"
            )
    if bound.spread:
        text += f" and {MARGIN} times the effect of permuting the examples"
    text = f"{bound.times:.3g} units in the last place of {text}"
    least = f"a fault that changes a gradient by less than {bound.usual:.1g} may not be seen"
    return dataclasses.replace(bound, text=f"{text}: {least}")


def _unit_of(trace: Trace) -> tuple[float, str]:
    """Returns the unit in which a training computes its gradients, and its dtype."""
    if trace.about.computed_in in UNITS:
        return UNITS[trace.about.computed_in], trace.about.computed_in
    before = trace.named(0, "before", 0) or {}
    weights = (array for key, array in before.items() if trace.kinds[key] == WEIGHT)
    large = (a for a in weights if np.size(a) >= ELEMENTS_OF_DTYPE and np.any(wide(a)))
    unit = min(map(unit_of, large), default=EPS)
    return next(((UNITS[name], name) for name in UNITS if UNITS[name] == unit), (EPS, ""))


def _permuted_pairs(reference: Trace, permuted: Trace) -> list[Pair]:
    """Returns the steps that begin equally with permuted examples."""
    matching = Matching(reference, permuted, {})
    steps = [
        [Step(x, x.steps.index(number)) for x in (reference, permuted)]
        for number in sorted({*reference.steps} & {*permuted.steps})
    ]
    pairs = [Pair(first, second, matching) for first, second in steps]
    return [pair for pair in pairs if pair.starts_equally]


def _moved(pairs: Sequence[Pair], name: str) -> float:
    """Returns how far permuted examples move the change of a variable, as part of it."""
    found = 0.0
    for pair in pairs:
        for variable in [v for v in pair.variables if v.first == name]:
            first, own = pair.state(variable), pair.state(variable, 0)
            if first is not None and own is not None and same_values(first.old, own.old):
                far = distance(own.new, first.new)
                found = max(found, ratio(far, norm(first.change)))
    return found


def _beyond(bound: Tolerance, pairs: Sequence[Pair]) -> set[str]:
    """Returns the weights whose gradients permuted examples move by more than a bound."""
    return {
        name for pair in pairs
        for name, share in bound.shares(pair.sums[0], [(1.0, pair.right_sum)]).items()
        if not share <= 1
    }  # fmt: skip


def _spread(pairs: Sequence[Pair]) -> dict[str, float]:
    """Returns weight → how far permuted examples move its gradient, in parts of the largest."""
    found: dict[str, float] = {}
    for pair in pairs:
        largest = max((norm_in(pair.right_sum, name) for name in pair.names), default=0.0)
        for name in pair.names:
            far = distance(stored(pair.sums[0], name), stored(pair.right_sum, name))
            apart = ratio(far, largest)
            found[name] = max(found.get(name, 0.0), apart)
    return found


def of_step(bound: Tolerance, pair: Pair) -> Tolerance:
    """Returns the bound of one step: by the size of its batch, its layers, and what is summed."""
    if bound.given:
        return bound
    reference, has_norms = pair.reference, has_batch_norms(pair.reference)
    if pair.training.trace.model_axes and bound.unit > EPS:
        num_weights = sum(kind == WEIGHT for kind in reference.trace.kinds.values())
        bound = dataclasses.replace(bound, times=bound.times * max(2.0, num_weights**0.5))
    if has_norms and bound.unit == EPS:
        bound = dataclasses.replace(bound, zero=ZERO)
    if pair.is_port and bound.unit == EPS:
        bound = dataclasses.replace(bound, times=max(bound.times, WITHOUT_SPREAD))
    num_inputs = sum(x.size for shard in reference.shards for x in reference.inputs(shard))
    least = WITHOUT_SPREAD if pair.is_port or has_norms else WITH_SPREAD
    bound = bound.of_inputs(num_inputs, least=least)
    return dataclasses.replace(bound, summed=_sizes_of_summands(pair))


def _sizes_of_summands(pair: Pair) -> dict[str, float]:
    """Returns weight → Σ ‖t‖ of what shards, or passes, add: their parts may cancel."""
    found, share = dict[str, float](), pair.framework_share or 1 / len(pair.shards)
    for name in pair.names:
        sizes = [sum(share * norm_in(own, name) for own in pair.raw)]
        for passes in pair.passes:
            sizes.append(len(pair.passes) * share * sum(norm_in(own, name) for own in passes))
        found[name] = min(max(sizes), MOST_CANCELLED * norm_in(pair.right_sum, name))
    return found


def cancels(pair: Pair, name: str) -> bool:
    """Returns whether what shards add cancels to so little that their own rounding is larger."""
    share = pair.framework_share or 1 / len(pair.shards)
    size = sum(share * norm_in(own, name) for own in pair.raw)
    return size > MOST_CANCELLED * norm_in(pair.right_sum, name)


def with_ties(bound: Tolerance, pair: Pair, apart: float) -> Tolerance:
    """Returns the bound where units whose inputs are nearly 0 may turn over.

    Layers that normalise a batch, and a GPU's kernels for batches of another size, add in another
    order; the outputs of equal examples then differ, by rounding alone.

    Args:
        bound: the bound without ties.
        pair: the step.
        apart: the largest relative difference of outputs.
    """
    if bound.unit > EPS and pair.training.trace.model_axes and apart > bound.unit:
        return dataclasses.replace(bound, times=bound.times * apart / bound.unit)
    devices = {step.trace.about.device for step in (pair.reference, pair.training)}
    has_norms = has_batch_norms(pair.training)
    may_turn = has_norms or bool(devices & {"cuda", "gpu"})
    if bound.unit > EPS or not (may_turn and 0 < apart <= ROUNDING_OF_OUTPUTS):
        return bound
    return dataclasses.replace(bound, ties=TIES if has_norms else TIES_ALONE)


def wrong_gradients(own: Named, right: Named, bound: Tolerance, pair: Pair) -> set[str]:
    """Returns the weights whose used gradients are not right; clipping adds a small constant."""
    found = bound.shares(own, [(1.0, right)])
    if max(found.values(), default=0.0) > 1 and pair.clip_factor < 1 - EPS:
        slack = IN_CLIPPING / max(norm_of(pair.right_sum), TINY)
        for factor in (1 + slack, 1 - slack):
            others = bound.shares(own, [(factor, right)])
            found = {name: min(share, others[name]) for name, share in found.items()}
    return {name for name, share in found.items() if not share <= 1}


# --- Of sums, and of outputs ----------------------------------------------------------------------


def solved(bound: Tolerance) -> Bound:
    """Returns the bound of a reference's gradients as sums of terms that were solved for."""

    def shares(own: Named, expression: Expression, names: Sequence[str]) -> dict[str, float]:
        found = bound.shares(own, expression, names)
        return {name: share / OF_SOLUTION for name, share in found.items()}

    return shares


def of_rounding(unit: float = EPS, times: float = OF_REDUCTION) -> Bound:
    """Returns the bound of a sum of recorded arrays: their own rounding and the reduction's."""

    def shares(own: Named, expression: Expression, names: Sequence[str]) -> dict[str, float]:
        found = {}
        for name in names:
            terms = [(c, stored(term, name)) for c, term in expression if name in term and c]
            size = size_of(expression, name) or norm_in(own, name)
            gap = gap_of(stored(own, name), terms)
            found[name] = gap.length / (times * unit * size + TINY) if gap else np.inf
        return found

    return shares


def of_changes(allowed: Named) -> Bound:
    """Returns the bound of changes of state, as a 2-norm over each variable."""

    def shares(own: Named, expression: Expression, names: Sequence[str]) -> dict[str, float]:
        found = {}
        for name in names:
            terms = [c * term[name] for c, term in expression if name in term]
            value = np.sum([np.zeros_like(own[name]), *terms], axis=0)
            found[name] = distance(own[name], value) / allowed[name]
        return found

    return shares


def of_sums(pair: Pair, times: float = OF_REDUCTION) -> Bound:
    """Returns the bound of what copies got, as a sum of what shards computed."""
    arrays = (a for own in pair.training.named("raw") for a in own.values())
    units = [unit_of(array) for array in arrays if np.any(wide(array))]
    return of_rounding(max(EPS, min(units, default=EPS)), times)
