"""Measures how far rounding reaches: repeats a step with other rounding."""

from collections.abc import Sequence
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
from lockstep.numeric.tolerance import Expression
from lockstep.oracles import Ask, Computed, Oracle

_MORE_REPETITIONS = 6  # Where a gradient is farther than usual.


class Expected(NamedTuple):
    """The step of a shard on one device, and how far rounding reaches.

    Attributes:
        step: the step.
        forward: relative distance of predictions and loss that rounding can cause.
        backward: relative distance of all gradients.
        gradients: absolute distance of each gradient.
        statistics: absolute distance of each statistic that the step changes.
        in_float64: whether the step was computed in float64.
    """

    step: Computed
    forward: float
    backward: float
    gradients: dict[str, float]
    statistics: dict[str, float]
    in_float64: bool = False


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
        """Returns how far rounding can move an expression for one gradient."""
        size = sum(abs(factor) * norm(term[name]) for factor, term in expression if name in term)
        times = self.times * max((abs(factor) for factor, _ in expression), default=0.0)
        measured = sum(step.gradients.get(name, 0.0) for step in self.steps)
        backward = max(step.backward for step in self.steps)
        return MARGIN * max(abs(times) * measured, backward * size) + TINY

    def shares(
        self, observed: Named, expression: Expression, names: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Returns name → distance of a gradient from an expression, over its bound."""
        found = {}
        for name in observed if names is None else names:
            if parts := [factor * dense(term[name]) for factor, term in expression if name in term]:
                apart = distance(observed[name], np.sum(parts, axis=0))
                found[name] = apart / self.allowed(expression, name)
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
    own, exact = near.step, oracle.compute(ask, exactly=True)
    forward = relative_distance(own.y_pred, exact.y_pred)
    backward = relative_norm(own.raw, exact.raw)
    if forward > MARGIN * near.forward or backward > MARGIN * near.backward:
        return near  # The code depends on dtypes.
    gradients = {
        name: max(distance(own.raw[name], exact.raw[name]), apart)
        for name, apart in near.gradients.items()
    }
    return Expected(
        exact._replace(after=own.after, of_parts=own.of_parts), max(forward, near.forward),
        max(backward, near.backward), gradients, near.statistics, True,
    )  # fmt: skip


def _repeated(oracle: Oracle, ask: Ask, rounded: Sequence[str], seed: int) -> Expected:
    """Repeats a step with variables changed by one unit, in another order, and in finer layers."""
    generator, unit, own = np.random.default_rng(seed), oracle.unit, oracle.compute(ask)
    others: list[Computed] = []
    for _ in range(2):
        near = _changed(ask, rounded, unit, generator)
        others.append(oracle.compute(ask._replace(state=ask.state | near)))
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
    forward = backward = unit
    gradients = dict.fromkeys(own.raw, 0.0)
    after, state = own.after, ask.state
    changed = [n for n in rounded if n in state and not same_bits(after[n], state[n])]
    # A mean of nearly 0, as behind another normalisation, has rounding errors of larger numbers.
    statistics = {n: max(distance(each.after[n], after[n]) for each in others) for n in changed}
    size = total_norm(own.raw)
    for result in others:
        forward = max(forward, relative_distance(result.y_pred, own.y_pred))
        if result.raw.keys() != own.raw.keys():  # From a step that overflowed.
            continue
        apart = {name: distance(result.raw[name], g) for name, g in own.raw.items()}
        gradients = {name: max(apart[name], far) for name, far in gradients.items()}
        backward = max(backward, ratio(float(np.sqrt(sum(a**2 for a in apart.values()))), size))
    for name, far in gradients.items():
        if (relative := ratio(far, norm(own.raw[name]))) < NOTHING_BUT_ROUNDING:
            backward = max(backward, relative)
    return Expected(own, forward, backward, gradients, statistics)


def widened(
    oracle: Oracle, ask: Ask, rounded: Sequence[str], expected: Expected, y_pred: Sequence[Array]
) -> Expected:
    """Returns `expected` with gradients as far as those of predictions that are as far as recorded.

    A ReLU whose input is nearly 0 may have another sign in other code, whose rounding errors are
    larger than those of the few repetitions.

    Args:
        oracle, ask, rounded: see `measure`.
        expected: the step.
        y_pred: the recorded predictions, equal to those expected within rounding; empty if none
            are recorded.
    """
    far = float(MARGIN)  # In `expected.forward`, as far as predictions may be.
    if y_pred:
        apart = relative_distance(y_pred, expected.step.y_pred)
        far = float(np.clip(ratio(apart, expected.forward), 1, MARGIN))
    generator, gradients = np.random.default_rng(0), dict(expected.gradients)
    for _ in range(_MORE_REPETITIONS):
        near = _changed(ask, rounded, oracle.unit * far, generator)
        raw = oracle.compute(ask._replace(state=ask.state | near)).raw
        for name in gradients.keys() & raw.keys():
            apart = distance(raw[name], expected.step.raw[name])
            gradients[name] = max(gradients[name], apart)
    return expected._replace(gradients=gradients)


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
    result: Computed, own: Computed, near: Sequence[Computed], unit: float
) -> bool:
    """Returns whether a repeated step differs by more than rounding: it depends on the order."""

    def apart(other: Computed) -> tuple[float, float]:
        has_same_names = other.raw.keys() == own.raw.keys()
        gradients = relative_norm(other.raw, own.raw) if has_same_names else 0.0
        return relative_distance(other.y_pred, own.y_pred), gradients

    usual = np.max([apart(other) for other in near], axis=0)
    return bool(np.any(np.array(apart(result)) > 100 * np.maximum(usual, unit)))
