"""Explains updates whose gradients are not recorded, by state that is linear in them.

A momentum, a first moment, or a weight under plain SGD, is X' = β · X + c · gradient. With a times
the gradient, X' = a · (X' of the reference) + (1 − a) · β · X, whatever β and c are. On replicas
that each use their own gradient, the mean of X' is that of the reference.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lockstep.answer.text import count
from lockstep.data.trace import WEIGHT
from lockstep.explain.backward_passes import backward_passes_in_state
from lockstep.explain.kept import slots_of, states_of, whole_states
from lockstep.explain.solve import solve
from lockstep.numeric.arrays import Named, is_far, norm
from lockstep.reference import StepPair

_CLOSE = 1e-4  # Relative; of state in float32.


def unseen_gradients(pair: StepPair) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yields stage, cause, sentence, and the checked recording's names of weights."""
    if pair.gradients.names or not pair.has("before", "after"):
        return
    if of_passes := [*_of_passes(pair)]:
        yield from of_passes
        return
    found = [*_own_of_copies(pair)] or [*_common_factor(pair)]
    for each in found:
        yield "all-reduce", *each


def _of_passes(pair: StepPair) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yields state that shows which backward passes of a step count, on all copies alike."""
    names = {each.second: each.first for each in pair.matching.pairs}
    for group in _linear(pair):
        weights = {first: names[weight] for first, _, weight in group}
        copies = [_states(pair, group, copy) for copy in pair.second.copies]
        found = {backward_passes_in_state(pair, weights, each) if each else None for each in copies}
        if len(found) == 1 and (why := found.pop()):
            yield *why, [weight for *_, weight in group]
            return


def _linear(pair: StepPair) -> Iterator[list[tuple[str, str, str]]]:
    """Yields state that may be linear in the gradients: lists of its names, and of its weight."""
    groups: dict[str, list[tuple[str, str, str]]] = {}
    weights = [
        names for names in pair.matching.pairs if pair.first.trace.kinds[names.first] == WEIGHT
    ]
    shapes = {key: variable.shape for key, variable in pair.first.trace.variables.items()}
    for names in weights:
        is_same_order = names.transpose == tuple(range(len(names.transpose)))
        for slot, keys in slots_of(pair, *names[:2]).items():
            if is_same_order and shapes[keys[0]] == shapes[names.first]:
                groups.setdefault(slot, []).append((*keys, names.second))
    yield from groups.values()
    settings = [step.trace.about.optimizer for step, _ in pair.both]
    is_plain = all(str(own.get("class")).lower() == "sgd" for own in settings) and not any(
        own.get("momentum") or own.get("weight_decay") for own in settings
    )
    rates = {own.get("learning_rate") for own in settings}
    if is_plain and not groups and len(rates) == 1:
        yield [(names.first, names.second, names.second) for names in weights]


def _states(pair: StepPair, group: Sequence[tuple[str, str, str]], copy: int) -> list[Named]:
    """Returns state by the names of the reference: before, after it there, and after a copy's."""
    found: list[Named] = [{}, {}, {}]
    for first, second, _ in group:
        right = states_of(pair.first, first)[0]
        wholes = whole_states(states_of(pair.second, second), right[1].shape) if right else []
        own = wholes[copy] if wholes else None
        if not (right and own and np.array_equal(right[0], own[0])):
            return []
        for named, array in zip(found, (*right, own[1]), strict=True):
            named[first] = array
    return found


def _common_factor(pair: StepPair) -> Iterator[tuple[str, str, list[str]]]:
    """Yields the factor of all gradients, the same on each copy."""
    best: tuple[float, list[str]] | None = None
    for group in _linear(pair):
        factors = [_factor_of(_states(pair, group, copy)) for copy in pair.second.copies]
        if not all(factors) or np.ptp(factors) > _CLOSE * max(factors):
            continue
        if best is None or abs(np.log(factors[0])) < abs(np.log(best[0])):
            best = factors[0], [name for *_, name in group]
    if best is None or abs(best[0] - 1) < 10 * _CLOSE:
        return
    factor, names = best
    num = pair.second.trace.about.num_replicas
    text = f"the optimizer's state is that of gradients that are {factor:.6g} times as large"
    cause = "scaled_gradient"
    if num > 1 and abs(factor / num - 1) < 10 * _CLOSE:
        cause, text = "sum_instead_of_mean", f"{text}: the number of replicas"
    elif num > 1 and abs(factor * num - 1) < 10 * _CLOSE:
        cause, text = "mean_instead_of_sum", f"{text}: one over the number of replicas"
    yield cause, text, names


def _factor_of(states: Sequence[Named]) -> float:
    """Returns the factor of the gradients that give a state; 0 if there is none."""
    if not states:
        return 0.0
    old, first, second = states
    factors, known = solve(second, [first, old])
    factor, kept = map(float, np.where(known & np.isfinite(factors), factors, 0.0))
    if not factor > 0 or not any(np.any(first[name] != old[name]) for name in first):
        return 0.0
    if any(is_far(second[n], factor * first[n] + kept * old[n], _CLOSE) for n in first):
        return 0.0
    # What is never negative is a mean, or a sum, of squares.
    is_of_squares = all(np.all(state[name] >= 0) for state in states for name in state)
    return factor**0.5 if is_of_squares else factor


def _own_of_copies(pair: StepPair) -> Iterator[tuple[str, str, list[str]]]:
    """Yields weights of which each copy uses its own gradient, whose mean or sum is right."""
    copies = pair.second.copies
    if len(copies) < 2:
        return
    for group in _linear(pair):
        states = [_states(pair, group, copy) for copy in copies]
        if not all(states):
            continue
        odd = {}
        for first, _, weight in group:
            own = [each[2][first] for each in states]
            is_odd = any(is_far(value, own[0], _CLOSE) for value in own[1:])
            if is_odd and norm(states[0][1][first] - states[0][0][first]):
                odd[first] = weight
        factor = _factor_of_mean(pair, odd, states) if odd else 0.0
        if factor:
            text = f"each replica updates {count('weight', len(odd))} with a gradient of its own"
            text += ", and their mean is right"
            if abs(factor - 1) > 10 * _CLOSE:
                text += f" for {factor:.6g} times the gradients"
            cause = "partly_all_reduced" if len(odd) < len(group) else "not_all_reduced"
            yield cause, text, [*odd.values()]
            return


def _factor_of_mean(
    pair: StepPair, odd: Mapping[str, str], states: Sequence[Sequence[Named]]
) -> float:
    """Returns the factor of the mean of all copies' gradients, that is right else; 0 if it is not.

    Args:
        pair: the step.
        odd: name of a state → the checked recording's name of its weight.
        states: for each copy, those of `_states`.
    """
    old, new = ({name: states[0][i][name] for name in odd} for i in (0, 1))
    own = [{name: each[2][name] for name in odd} for each in states]

    def of_mean(old: Named, new: Named, own: Sequence[Named]) -> float:
        mean = {name: np.mean([each[name] for each in own], axis=0) for name in odd}
        return _factor_of([old, new, mean])

    if factor := of_mean(old, new, own):
        return factor
    if any(np.any(array < 0) for each in (old, new, *own) for array in each.values()):
        return 0.0
    zeros = {name: np.zeros_like(array) for name, array in old.items()}
    copies = zip(own, pair.second.copies, strict=True)
    roots = [_roots(pair, odd, old, each, copy) for each, copy in copies]
    return of_mean(zeros, _roots(pair, odd, old, new, None), roots)


def _roots(
    pair: StepPair, weights: Mapping[str, str], old: Named, new: Named, copy: int | None
) -> Named:
    """Returns the gradients whose squares a step adds to state, as of Adagrad, of a copy.

    Their signs are those of the changes of the weights; `copy` is None for the reference.
    """
    step, at = (pair.first, 0) if copy is None else (pair.second, copy)
    names = {each.second: each.first if copy is None else each.second for each in
             pair.matching.pairs}  # fmt: skip
    found = Named()
    for name, weight in weights.items():
        state = states_of(step, names[weight])[at]
        moved = np.zeros(()) if state is None else state[0] - state[1]
        found[name] = np.sign(moved) * np.sqrt(np.maximum(new[name] - old[name], 0))
    return found
