"""Measures how far rounding reaches: repeats a step with other rounding."""

import types
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.numeric.arrays import (
    EPS,
    MARGIN,
    NOTHING_BUT_ROUNDING,
    TINY,
    Array,
    Named,
    dense,
    distance,
    norm,
    ratio,
    relative_distance,
    relative_norm,
    same_bits,
    total_norm,
)
from lockstep.numeric.tolerance import TIES, Expression, error_of_sum, gap_of, share_of_ties
from lockstep.oracles import Ask, Computed, Oracle

_DRAWS = 10  # Of rounding, where a gradient is farther than usual.
_NOISE = 4  # The rounding that is drawn, over that of the outputs; `MARGIN` with `_OF_DRAWS`.
_OF_DRAWS = 2
_OF_ORDER = 4 / MARGIN  # Of the distance of two orders of long sums.
_ANOTHER = 100  # Times the usual distance: not rounding.


class Drawn(NamedTuple):
    """How far drawn rounding moves a gradient.

    Attributes:
        far: the largest distance.
        along: the largest distance in the direction of the gradient.
    """

    far: float
    along: float


class Moved(NamedTuple):
    """How far a repetition moves the gradients.

    Attributes:
        gradients: absolute distance of each gradient.
        backward: relative distance of all gradients.
    """

    gradients: dict[str, float]
    backward: float

    @staticmethod
    def between(result: Named, own: Named, unit: float) -> "Moved":
        """Returns how far a result is from a step; 0 for one that overflowed.

        Args:
            result: the gradients of the result.
            own: those of the step.
            unit: the least relative distance.
        """
        if result.keys() != own.keys():
            return Moved(dict.fromkeys(own, 0.0), unit)
        apart = {name: distance(result[name], g) for name, g in own.items()}
        relative = [ratio(far, norm(own[name])) for name, far in apart.items()]
        every = ratio(float(np.sqrt(sum(far**2 for far in apart.values()))), total_norm(own))
        return Moved(apart, max(unit, every, *(r for r in relative if r < NOTHING_BUT_ROUNDING)))


class Expected(NamedTuple):
    """The step of a shard on one device, and how far rounding reaches.

    Attributes:
        step: the step.
        forward: relative distance of predictions and loss that rounding can cause.
        backward: relative distance of all gradients.
        gradients: absolute distance of each gradient.
        statistics: absolute distance of each statistic that the step changes.
        in_float64: whether the step was computed in float64.
        ask: what was computed.
        of_unit: relative distance of predictions after a change of all weights by a unit.
        drawn: for each gradient, how far rounding that turns units over moves it; see `widened`.
        smooth: for each gradient, how far the repetition moves it that moves it least.
        in_float32: the same in float32, if the step was computed in float64.
    """

    step: Computed
    forward: float
    backward: float
    gradients: dict[str, float]
    statistics: dict[str, float]
    in_float64: bool = False
    ask: Ask | None = None
    of_unit: float = EPS
    drawn: Mapping[str, Drawn] = types.MappingProxyType({})
    smooth: Mapping[str, Drawn] = types.MappingProxyType({})
    in_float32: "Expected | None" = None

    @property
    def without_ties(self) -> "Expected":
        """The same, if few units turn over: a gradient moves in its direction as outputs do."""
        if not self.smooth:
            return self
        times = MARGIN / _OF_DRAWS
        drawn = {
            name: Drawn(times * far, times * along) for name, (far, along) in self.smooth.items()
        }
        along = {name: own.along for name, own in self.smooth.items()}
        return self._replace(gradients=along, backward=max(self.of_unit, EPS), drawn=drawn)


class OracleBound(NamedTuple):
    """How far rounding can move sums of gradients of some steps, as Euclidean distances.

    The gradients of the steps may cancel each other, but not their rounding errors.

    Attributes:
        steps: the steps.
        times: factor of their gradients over those that were measured.
    """

    steps: Sequence[Expected]
    times: float = 1.0

    def allowed(self, expression: Expression, name: str) -> float:
        """Returns how far rounding can move an expression for one gradient, in any direction."""
        size = sum(abs(factor) * norm(term[name]) for factor, term in expression if name in term)
        measured = sum(step.gradients.get(name, 0.0) for step in self.steps)
        backward = max(step.backward for step in self.steps)
        return MARGIN * max(self._times(expression) * measured, backward * size) + TINY

    def of_ties(self, expression: Expression, name: str) -> Drawn:
        """Returns how far units that turn over can move it; not less than `allowed`."""
        drawn = [step.drawn[name] for step in self.steps if name in step.drawn]
        times, least = _OF_DRAWS * self._times(expression), self.allowed(expression, name)
        far, along = (max(least, times * sum(each)) for each in zip(*drawn, (0, 0), strict=True))
        return Drawn(far, along)

    def _times(self, expression: Expression) -> float:
        return abs(self.times) * max((abs(factor) for factor, _ in expression), default=0.0)

    def shares(
        self, observed: Named, expression: Expression, names: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Returns name → distance of a gradient from an expression, over its bound."""
        found = {}
        for name in observed if names is None else names:
            if terms := [(factor, term[name]) for factor, term in expression if name in term]:
                gap = gap_of(observed[name], terms)
                found[name] = gap.length / self.allowed(expression, name) if gap else np.inf
                if gap and found[name] > 1:
                    ties = self.of_ties(expression, name)
                    found[name] = min(found[name], share_of_ties(gap, *ties))
        return found

    def near(
        self, observed: Named, expression: Expression, names: Sequence[str] | None = None
    ) -> list[str]:
        """Returns the names of the gradients that are an expression, within rounding."""
        return [n for n, far in self.shares(observed, expression, names).items() if far <= 1]


def measure(
    oracle: Oracle, ask: Ask, rounded: Sequence[str], *, seed: int, exactly: bool
) -> Expected:
    """Computes a step in float64 if possible, and the effect of float32 rounding.

    Args:
        oracle: computes the step.
        ask: the step.
        rounded: names of the variables to change by one unit in the last place.
        seed: seed of the changes.
        exactly: whether to try float64.
    """
    near = _repeated(oracle, ask, rounded, seed)
    if not exactly:
        return near
    own, exact = near.step, oracle.compute(near.ask or ask, exactly=True)
    forward = relative_distance(own.y_pred, exact.y_pred)
    backward = relative_norm(own.raw, exact.raw)
    if forward > MARGIN * near.forward or backward > MARGIN * near.backward:
        return near  # The code depends on dtypes.
    gradients = {
        name: max(distance(own.raw[name], exact.raw[name]), apart)
        for name, apart in near.gradients.items()
    }
    return near._replace(
        step=exact._replace(after=own.after, of_parts=own.of_parts),
        forward=max(forward, near.forward),
        backward=max(backward, near.backward),
        gradients=gradients,
        in_float64=True,
        in_float32=near,
    )


def _repeated(oracle: Oracle, ask: Ask, rounded: Sequence[str], seed: int) -> Expected:
    """Repeats a step with variables changed by one unit, in another order, and in finer layers.

    Layers that synchronise add over the shards, as in a training, if that is what they compute from
    the whole batch at once.
    """
    generator, unit, own = np.random.default_rng(seed), oracle.unit, oracle.compute(ask)
    others: list[Computed] = []
    for _ in range(2):
        near = _changed(ask, rounded, unit, generator)
        others.append(oracle.compute(ask._replace(state=ask.state | near)))
    of_unit = max(relative_distance(other.y_pred, own.y_pred) for other in others)
    after, state = own.after, ask.state
    changed = [n for n in rounded if n in state and not same_bits(after[n], state[n])]
    at_once = own
    if ask.parts and not ask.at_once:
        whole = ask._replace(at_once=True)
        at_once, sizes = oracle.compute(whole), {n: distance(after[n], state[n]) for n in changed}
        least = MARGIN * error_of_sum(sum(array.size for array in ask.data)) * unit, TIES
        if _is_another_step(at_once, own, others, unit, least, sizes):
            return _repeated(oracle, whole, rounded, seed)
    num = len(ask.data[0])
    aligned = all(len(p) == num for p in own.y_pred if p.ndim)
    if not oracle.random_layers and aligned and num > 1:
        order = generator.permutation(num)
        starts = None if ask.starts is None else [start[order] for start in ask.starts]
        moved = ask._replace(data=[array[order] for array in ask.data], starts=starts)
        result = oracle.compute(moved)
        back = np.argsort(order)
        result = result._replace(y_pred=[p[back] if p.ndim else p for p in result.y_pred])
        if not _is_another_step(result, own, others, unit):
            others.append(result)
    # A bfloat16 sum may saturate at the same number in all of these repetitions.
    fine = oracle.compute_finely(ask) if unit > EPS else None
    if fine and not _is_another_step(fine, own, others, unit):
        others.append(fine)
    # A mean of nearly 0, as behind another normalisation, has rounding errors of larger numbers.
    statistics = {
        n: max(
            *(distance(each.after[n], after[n]) for each in others),
            _OF_ORDER * distance(at_once.after[n], after[n]),
        )
        for n in changed
    }
    forward = max(relative_distance(other.y_pred, own.y_pred) for other in others)
    forward = max(unit, forward, _OF_ORDER * relative_distance(at_once.y_pred, own.y_pred))
    reached = [Moved.between(other.raw, own.raw, unit) for other in others]
    backward = max(each.backward for each in reached)
    gradients = {name: max(each.gradients[name] for each in reached) for name in own.raw}
    drawn = [_drawn(other.raw, own.raw) for other in others[:2]]
    smooth = {
        name: Drawn(*np.min([each[name] for each in drawn], axis=0))
        for name in own.raw
        if all(name in each for each in drawn)
    }
    return Expected(
        own, forward, backward, gradients, statistics, ask=ask, of_unit=of_unit, smooth=smooth
    )


def widened(
    oracle: Oracle, rounded: Sequence[str], expected: Expected, y_pred: Sequence[Array]
) -> Expected:
    """Returns `expected` with what rounding moves that may turn units over; see `tolerance`.

    Args:
        oracle, rounded: see `measure`.
        expected: the step.
        y_pred: the recorded predictions, equal to those expected within rounding; empty if none
            are recorded.
    """
    ask, step = expected.ask, expected.step
    apart = relative_distance(y_pred, step.y_pred) if y_pred else _OF_DRAWS * expected.forward
    if ask is None:
        return expected
    times = _NOISE * max(1.0, apart / max(expected.of_unit, oracle.unit))
    generator, drawn = np.random.default_rng(0), dict[str, Drawn]()
    for number in range(_DRAWS):
        unit = oracle.unit * times
        near = ask._replace(
            state=ask.state | _changed(ask, rounded, unit, generator), noise=(unit, number)
        )
        for name, own in _drawn(oracle.compute(near).raw, step.raw).items():
            last = drawn.get(name, own)
            drawn[name] = Drawn(max(last.far, own.far), max(last.along, own.along))
    return expected._replace(drawn=drawn)


def _drawn(result: Named, own: Named) -> dict[str, Drawn]:
    """Returns how far each gradient of a result is from that of a step."""
    found = {}
    for name in own.keys() & result.keys():
        value = dense(own[name])
        gap = dense(result[name]) - value
        along = abs(float(np.sum(gap * value))) / max(norm(value), TINY)
        found[name] = Drawn(norm(gap), along)
    return found


def _changed(
    ask: Ask, rounded: Sequence[str], unit: float, generator: np.random.Generator
) -> dict[str, Array]:
    """Returns variables, each number changed by a relative `unit` up or down."""
    return {
        name: array * (1 + unit * generator.choice([-1, 1], array.shape)).astype(array.dtype)
        for name, array in ask.state.items()
        if name in rounded
    }


def _is_another_step(
    result: Computed, own: Computed, near: Sequence[Computed], unit: float,
    least: tuple[float, float] = (0.0, 0.0), changes: Mapping[str, float] | None = None,
) -> bool:  # fmt: skip
    """Returns whether a repeated step differs by more than rounding: it depends on the order.

    Args:
        result: the repeated step.
        own: the step.
        near: the step after changes in the last place.
        unit: the unit of these changes.
        least: relative distance of outputs, and of gradients, that rounding can cause at least.
        changes: name of a statistic to compare, too → by how much the step changes it.
    """
    sizes = changes or {}

    def apart(other: Computed) -> list[float]:
        has_same_names = other.raw.keys() == own.raw.keys()
        gradients = relative_norm(other.raw, own.raw) if has_same_names else 0.0
        statistics = [ratio(distance(other.after[n], own.after[n]), sizes[n]) for n in sizes]
        return [gradients, relative_distance(other.y_pred, own.y_pred), *statistics]

    usual = np.max([apart(other) for other in near], axis=0)
    limits = np.maximum(_ANOTHER * np.maximum(usual, unit), least[0])
    limits[0] = max(limits[0], least[1])
    return bool(np.any(np.array(apart(result)) > limits))
