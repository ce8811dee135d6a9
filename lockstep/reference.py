"""Takes the same training in another trace as what is right: names and layouts are matched."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lockstep.answer.verdict import Finding
from lockstep.context import Context
from lockstep.data.match import Matching
from lockstep.data.trace import STATISTIC, WEIGHT, Trace, Variable
from lockstep.numeric.arrays import (
    EPS,
    MARGIN,
    TINY,
    UNITS,
    Named,
    distance,
    elements_of,
    factor_of,
    hashes_of,
    norm,
    ratio,
    unit_of,
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
    Tolerance,
)
from lockstep.oracles.rules import Rule, RuleOracle
from lockstep.step import Gradients, has_batch_norms

_LARGE = 16  # Elements that tell the dtype in which they were kept.


_EPSILON_OF_CLIPPING = 1e-6  # PyTorch divides by the norm and this.
SAME_START = 1e-7  # Relative; states that are only transposed have a distance of 0.


class StepPair:
    """One step in two traces; arrays have the names and layouts of the first.

    Args:
        first: the step in the reference.
        second: the step in the trace that is checked.
        matching: pairs of variables of both traces.
        tolerance: tolerance of the gradients.

    Attributes:
        both: the step in the checked trace, then in the reference, each with its name in texts.
        findings: what was found in the comparison so far.
    """

    def __init__(self, first: Context, second: Context, matching: Matching, tolerance: Tolerance):
        self.first, self.second, self.matching = first, second, matching
        self._of_reference = tolerance
        self.both = (second, "second"), (first, "first")
        self.findings: list[Finding] = []

    @functools.cached_property
    def tolerance(self) -> Tolerance:
        """The bound of this step."""
        is_port = self.first.trace.about.framework != self.second.trace.about.framework
        return of_step(self._of_reference, self.first, is_port=is_port)

    def steps(self) -> Iterator["StepPair"]:
        """Yields all steps that both trainings have."""
        for first, second in common_steps(self.first.trace, self.second.trace):
            yield StepPair(first, second, self.matching, self.tolerance)

    def earlier(self) -> Iterator["StepPair"]:
        """Yields those before this one."""
        position = self.second.position
        return itertools.takewhile(lambda each: each.second.position < position, self.steps())

    def has(self, *kinds: str) -> bool:
        """Returns whether arrays of each kind were recorded in both."""
        return self.first.has(*kinds) and self.second.has(*kinds)

    def in_second(self, name: str) -> str:
        """Returns the checked trace's name of a variable of the reference; "" without one."""
        return next((p.second for p in self.matching.pairs if p.first == name), "")

    def _common(self, first: Named, second: Named) -> tuple[Named, Named]:
        other = self.matching.to_first(second)
        names = [name for name in first if name in other]
        return {name: first[name] for name in names}, {name: other[name] for name in names}

    def states(self, kind: str, of_second: str = "") -> tuple[Named, Named]:
        """Returns weights and statistics of a kind, such as "before" the step, of copy 0 in both.

        Args:
            kind: the kind.
            of_second: the kind in the checked trace; "" for the same.
        """
        if not (self.first.has(kind) and self.second.has(of_second or kind)):
            return {}, {}
        names = set(self.first.of_kind(WEIGHT, STATISTIC))
        first = {n: a for n, a in self.first.named(kind)[0].items() if n in names}
        return self._common(first, self.second.named(of_second or kind)[0])

    @property
    def ends(self) -> tuple[Named, Named]:
        """The same at the end of the step, after what the scripts change themselves."""
        names = {*self.states("after")[0]}
        first = {n: a for n, a in self.first.ends[0].items() if n in names} if names else {}
        return self._common(first, self.second.ends[0]) if names else ({}, {})

    @functools.cached_property
    def start_distances(self) -> dict[str, float]:
        """Name → relative distance of the variables that differ before the step."""
        first, second = self.states("before")
        apart = {n: ratio(distance(second[n], first[n]), norm(first[n])) for n in first}
        return {name: far for name, far in apart.items() if far > SAME_START}

    @functools.cached_property
    def starts_equally(self) -> bool:
        """Whether all replicas of both start the step from the same weights and statistics."""
        is_known = bool(self.states("before")[0]) and not self.start_distances
        second = self.second
        return is_known and not any(
            second.trace.kinds[name] == WEIGHT for name, *_ in second.unlike_first("before")
        )

    @property
    def computes_the_same(self) -> bool:
        """Whether both traces start from the same state and have the same examples."""
        return self.starts_equally and not self.found_in("examples")

    @functools.cached_property
    def has_same_shards(self) -> bool:
        """Whether the reference ran the model for each part of the batch of the checked trace.

        Layers such as BatchNorm have then seen the same examples in both.
        """
        first, second = self.first, self.second
        if not (first.has("shards", "data") and second.has("data") and len(first.shards) == 1):
            return False
        computed: dict[int, list[int]] = {}
        for inputs, numbers in zip(first.inputs(0), first.arrays("shards")[0], strict=False):
            for row, number in zip(hashes_of([inputs]), numbers.ravel().tolist(), strict=False):
                computed.setdefault(number, []).append(row)
        given = [hashes_of([x]) for shard in second.shards for x in second.inputs(shard) if len(x)]
        return sorted(map(sorted, computed.values())) == sorted(map(sorted, given))

    @functools.cached_property
    def gradients(self) -> Gradients:
        """The gradients of both, on their way to the update; without names if not recorded."""
        return Gradients(self.first, self.second, self.matching)

    @functools.cached_property
    def is_given_right(self) -> bool:
        """Whether each copy is given the gradient of the whole batch, as in the reference."""
        return self._agree(self.gradients.given, self.gradients.reference)

    @functools.cached_property
    def is_applied_right(self) -> bool:
        """Whether each copy applies the gradient that the reference applies."""
        return self._agree(self.gradients.applied, self.gradients.reference_applied)

    def allow_ties(self) -> None:
        """Allows that units whose inputs are nearly 0 turn over, if that explains all gradients."""
        tight = self.tolerance
        if tight.given:
            return
        ties = TIES if has_batch_norms(self.second) else TIES_ALONE
        self._set_tolerance(dataclasses.replace(tight, ties=ties))
        if not (self.is_given_right and self.is_applied_right):
            self._set_tolerance(tight)

    def measure_terms(self) -> None:
        """Gives the bound the sizes of what shards send, and of what passes add, if recorded."""
        terms, raw = self.gradients, self.gradients.raw
        sizes = {n: terms.share * sum(norm(own[n]) for own in raw) for n in terms.names if raw}
        passes = [own for of_shard in terms.backward_passes for own in of_shard]
        for name in terms.names if passes else ():
            own = [each[name] for each in passes if name in each]
            share = abs(factor_of([terms.reference[name]], [np.sum(own, axis=0)])) if own else 0.0
            size = share * sum(map(norm, own)) if np.isfinite(share) else 0.0
            sizes[name] = max(size, sizes.get(name, 0.0))
        if sizes and not self.tolerance.given:
            self._set_tolerance(dataclasses.replace(self.tolerance, summed=sizes))

    def enlarge(self, apart: float) -> None:
        """Widens the bound on ranks of a model that round to 16 bits; see `numeric.tolerance`.

        Args:
            apart: relative distance of the outputs of equal examples.
        """
        tight = self.tolerance
        if tight.unit > EPS and self.second.trace.model_axes and apart > tight.unit:
            times = tight.times * apart / tight.unit
            self._set_tolerance(dataclasses.replace(tight, times=times))

    def _set_tolerance(self, tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        for name in ("is_given_right", "is_applied_right", "different_gradients"):
            self.__dict__.pop(name, None)

    def _agree(self, copies: Sequence[Named], reference: Named) -> bool:
        distinct = {id(own): own for own in copies}
        return all(self.agrees(own, reference) for own in distinct.values())

    def agrees(self, own: Named, reference: Named) -> bool:
        """Returns whether gradients agree; clipping may have an epsilon beside the norm."""
        slack = _EPSILON_OF_CLIPPING / max(self.gradients.size, TINY)
        is_clipped = self.gradients.clipping[0] < 1 - EPS
        return any(
            self.tolerance.fits(own, [(factor, reference)])
            for factor in (1.0, *((1 + slack, 1 - slack) if is_clipped else ()))
        )

    @property
    def is_comparable(self) -> bool:
        """Whether both have gradients, of the same examples and from the same state."""
        return bool(self.gradients.names) and self.computes_the_same

    @property
    def are_gradients_right(self) -> bool:
        """Whether both have gradients, and they agree on each copy."""
        return bool(self.gradients.names) and self.is_given_right

    @functools.cached_property
    def different_gradients(self) -> dict[str, float]:
        """Name → relative distance of the gradients that differ on a copy."""
        found: dict[str, float] = {}
        for own in {id(each): each for each in self.gradients.given}.values():
            for name, far in self.tolerance.wrong(own, self.gradients.reference).items():
                found[name] = max(far, found.get(name, 0.0))
        return found

    def rules(self) -> dict[str, tuple[Rule, Rule]]:
        """Returns name of a weight → rules of the optimizers in both; empty if one is unknown."""
        first, second = self.first.updater, self.second.updater
        if not (isinstance(first, RuleOracle) and isinstance(second, RuleOracle)):
            return {}
        others = {name: second.rules.get(self.in_second(name)) for name in first.rules}
        return {name: (first.rules[name], rule) for name, rule in others.items() if rule}

    def found_in(self, stage: str) -> list[Finding]:
        """Returns what was found in a stage."""
        return [finding for finding in self.findings if finding.stage == stage]

    def explained(self, finding: Finding) -> Finding:
        """Returns a finding with the cause of different gradients, if that one is known."""
        causes = self.found_in("gradients") or self.found_in("all-reduce")
        if not causes or causes[0].detail == "unexplained":
            return finding
        why = causes[0]
        return dataclasses.replace(finding, status=why.status, detail=why.detail, may_be=why.may_be)


def of_step(tolerance: Tolerance, first: Context, *, is_port: bool = False) -> Tolerance:
    """Returns the bound of a step of the reference, by the size of its batch.

    Args:
        tolerance: the bound of the reference.
        first: the step.
        is_port: whether it is compared with another framework.
    """
    numbers = [x.size for shard in first.shards for x in first.inputs(shard)]
    has_norms = has_batch_norms(first)
    least = WITHOUT_SPREAD if is_port or has_norms else WITH_SPREAD
    if has_norms and tolerance.unit == EPS and not tolerance.given:
        tolerance = dataclasses.replace(tolerance, zero=ZERO)
    return tolerance.of_inputs(sum(numbers), least=least)


def match_traces(first: Trace, second: Trace, names: Mapping[str, str]) -> Matching:
    """Returns the pairs of variables of two traces.

    Args:
        first: the reference.
        second: the trace to check.
        names: names in one trace → names in the other, where they cannot be matched.

    Raises:
        ValueError: the traces have no step or no weight in common.
    """
    _require_equal_samples(first, second)
    matching = Matching(first, second, names)
    if not matching.pairs:
        raise ValueError(
            f"{second.name}: no weight matches one of {first.name} by name or shape; pass"
            " --name_map"
        )
    if not {*first.steps} & {*second.steps}:
        raise ValueError(
            f"{second.name}: has no step in common with {first.name}; record the same steps"
        )
    _require_equal_order(first, second, matching)
    return matching


def _require_equal_samples(first: Trace, second: Trace) -> None:
    """Raises a ValueError unless both traces have whole arrays, or equal samples of them."""
    samples = [
        trace.about.sample if any(v.shape for v in trace.about.variables) else {}
        for trace in (first, second)
    ]
    if samples[0] == samples[1]:
        return
    if not all(samples):
        whole, sampled = (first, second) if samples[1] else (second, first)
        raise ValueError(
            f"{sampled.name}: is recorded with sample=, and {whole.name} is whole; record both in"
            " the same way"
        )
    shown = (" and ".join(f"{n} {k}" for k, n in own.items() if k != "seed") for own in samples)
    raise ValueError(
        f"{second.name}: has other samples than {first.name} ({'; '.join(shown)}; seeds"
        f" {' and '.join(str(own['seed']) for own in samples)}); record both with the same sample="
    )


def _require_equal_order(first: Trace, second: Trace, matching: Matching) -> None:
    """Raises a ValueError if samples of a weight count its elements in other orders."""
    for pair in matching.pairs:
        own, other = first.variables[pair.first], second.variables[pair.second]
        if own.shape and _order_of(other, pair.transpose) != _order_of(own, range(len(own.shape))):
            raise ValueError(
                f"{second.name}: {other.name} is sampled with its axes in another order than"
                f" {own.name} of {first.name}; record both without sample="
            )


def _order_of(variable: Variable, transpose: Sequence[int]) -> list[int]:
    """Returns which axis of the reference is each axis of a sample, counted in order O, I, H, W.

    Args:
        variable: a variable that is sampled.
        transpose: for each axis of the reference, that of the variable.
    """
    layout = variable.layout if len(variable.layout) == len(transpose) else ""
    axes = sorted(range(len(transpose)), key=lambda k: "OIHW".find(layout[k]) if layout else k)
    return [[*transpose].index(axis) for axis in axes]


def common_steps(first: Trace, second: Trace) -> Iterator[tuple[Context, Context]]:
    """Yields the steps that both traces have; each holds the arrays that were read of it."""
    for number in first.steps:
        if number in second.steps:
            yield (
                Context(first, first.steps.index(number)),
                Context(second, second.steps.index(number)),
            )


def tolerance_of(
    first: Trace, permuted: Trace | None, names: Mapping[str, str], given: float | None
) -> Tolerance:
    """Returns the bound of the gradients of a reference; see `numeric.tolerance`.

    Args:
        first: the reference.
        permuted: the same training with permuted examples; None without one.
        names: names of weights in one recording → names in the other, where they do not match.
        given: relative difference that a user allows; None to compute it.

    Raises:
        ValueError: no step of the permuted recording starts from a state of the reference.
    """
    if given is not None:
        return Tolerance(f"{given:g}, given by --tolerance", given=given)
    unit, dtype = _unit_of(first)
    if unit > EPS:
        tolerance = Tolerance("", IN_16_BITS, unit, of_largest=OF_LARGEST)
        if dtype == "tensorfloat32":
            tolerance = Tolerance("", IN_TF32, unit)
        elif has_batch_norms(Context(first, 0)):
            tolerance = Tolerance("", 2 * IN_16_BITS, unit)
        text = f"{tolerance.times:g} units in the last place of {dtype}"
        if dtype == "tensorfloat32":
            text += " (float32 if NVIDIA_TF32_OVERRIDE=0 is set for both trainings)"
        return dataclasses.replace(tolerance, text=_told(text, tolerance.usual))
    zero = f"; one below {ZERO * EPS:.1g} of the largest gradient counts as 0 behind BatchNorm"
    zero = zero if has_batch_norms(Context(first, 0)) else ""
    if permuted is None:
        of_first = of_step(Tolerance(), Context(first, 0))
        text = (
            f"{of_first.times:.3g} units in the last place of float32, by the size of the batch;"
            " record a third time with permute=1 to compute it from the effect of rounding"
        )
        return Tolerance(_told(text, of_first.usual) + zero)
    spread, num_steps = _spread(first, permuted, names)
    text = (
        f"{WITH_SPREAD:g} units in the last place of float32 and {MARGIN} times the effect of"
        f" permuting the examples in {num_steps} steps of {permuted.name}"
    )
    tolerance = Tolerance("", WITH_SPREAD, unit, spread)
    return dataclasses.replace(tolerance, text=_told(text, tolerance.usual) + zero)


def _told(text: str, least: float) -> str:
    return f"{text}: a fault that changes a gradient by less than {least:.1g} may not be seen"


def _unit_of(trace: Trace) -> tuple[float, str]:
    """Returns the unit in which a training computes its gradients, and its dtype."""
    if trace.about.computed_in in UNITS:
        return UNITS[trace.about.computed_in], trace.about.computed_in
    weights = [key for key, kind in trace.kinds.items() if kind == WEIGHT]
    before = trace.named(0, "before", 0) or {} if trace.steps else {}
    kept = [elements_of(before[key]) for key in weights if key in before and np.any(before[key])]
    unit = min([unit_of(array) for array in kept if array.size >= _LARGE], default=EPS)
    return next(((UNITS[dtype], dtype) for dtype in UNITS if UNITS[dtype] == unit), (EPS, ""))


def of_pair(tolerance: Tolerance, first: Trace, second: Trace) -> Tolerance:
    """Returns the bound for one recording.

    Permuting the examples changes the order of sums over examples; another framework also sums
    pixels and channels in another order. The ranks of tensor or sequence parallelism round each
    part of an activation and of its gradient to the dtype of the layers, before they are added.
    """
    if tolerance.given:
        return tolerance
    if tolerance.unit > EPS and second.model_axes:
        num_weights = sum(kind == WEIGHT for kind in first.kinds.values())
        times = max(2.0, num_weights**0.5)
        text = f"{tolerance.text}, {times:.2g} times as much on ranks of a model"
        return dataclasses.replace(tolerance, times=times * tolerance.times, text=text)
    if first.about.framework == second.about.framework or tolerance.times >= WITHOUT_SPREAD:
        return tolerance
    text = f"{tolerance.text}, and at least {WITHOUT_SPREAD:g} units between two frameworks"
    times = tolerance.times if tolerance.unit > EPS else WITHOUT_SPREAD
    return dataclasses.replace(tolerance, times=times, text=text)


def _spread(
    first: Trace, permuted: Trace, names: Mapping[str, str]
) -> tuple[dict[str, float], int]:
    """Returns weight → distance of its gradient with permuted examples, and the number of steps.

    Distances are parts of the largest gradient of a step.
    """
    spread: dict[str, float] = {}
    num_steps, matching = 0, match_traces(first, permuted, names)
    for own, other in common_steps(first, permuted):
        pair = StepPair(own, other, matching, Tolerance())
        terms = pair.gradients
        if pair.starts_equally:
            num_steps += 1
        if terms.names and pair.starts_equally:
            largest = max(map(norm, terms.reference.values()))
            for name, gradient in terms.reference.items():
                apart = ratio(distance(terms.given[0][name], gradient), largest)
                spread[name] = max(spread.get(name, 0.0), apart)
    if not num_steps:  # Without recorded gradients, there is no spread, and states are compared.
        raise ValueError(
            f"{permuted.name}: no step starts from the state of {first.name}; record it with"
            " replay= and the same steps"
        )
    return spread, num_steps
