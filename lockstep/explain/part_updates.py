"""Explains updates of an unknown rule by what it computes of each rank's part of a weight alone.

Of equal gradients and states, what two updates have in common tells which arrays the rule took for
a whole weight: a factor of each part, as of its norm, means of squares over the rows of a part, or,
of a rule that changes singular values as Muon does, singular vectors of a part.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.explain.kept import slots_of, states_of
from lockstep.explain.solve import solve
from lockstep.numeric.arrays import Named, dense, factor_of, norm
from lockstep.reference import StepPair

_CLOSE = 1e-3  # Relative; of changes of float32 weights, and of their factors.
_SYMMETRIC = 1e-3  # Relative to the product of two norms.
_LEAST = 4  # Rows and columns of a matrix whose singular vectors tell something.


class Parts(NamedTuple):
    """A weight that both trainings change, cut into parts.

    Attributes:
        before: its parts before the step.
        first, second: by how much both change each of them.
    """

    before: list[np.ndarray]
    first: list[np.ndarray]
    second: list[np.ndarray]


def from_parts(
    pair: StepPair, changed: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    wrong_state: Mapping[str, Sequence[str]],
) -> tuple[str, str] | None:  # fmt: skip
    """Returns cause and sentence if each update is that of parts of a weight.

    Args:
        pair: the step.
        changed: wrong weight → it before the step, and by how much both trainings change it.
        wrong_state: weight → slots of its state that are wrong, too.
    """
    found: dict[str, list[str]] = {}
    _, first, second = zip(*changed.values(), strict=True) if changed else ((), (), ())
    if len(changed) > 1 and not wrong_state and _have_one_factor(first, second):
        return None  # That of the learning rate.
    for name in {**changed, **wrong_state}:
        if slots := wrong_state.get(name):
            why = _of_means(pair, name, slots)
        else:
            why = next(_of_weight(pair, name, *changed[name]), "")
        if not why:
            return None
        found.setdefault(why, []).append(name)
    texts = [f"{why}: {', '.join(names[:3])}" for why, names in found.items()]
    return ("updated_from_a_part", "; ".join(texts)) if texts else None


def _have_one_factor(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    factor = factor_of([*second], [*first])
    pairs = zip(first, second, strict=True)
    return all(norm(b - factor * a) <= _CLOSE * norm(b) for a, b in pairs)


def _numbers(pair: StepPair) -> list[int]:
    """Returns into how many parts the ranks may split a weight."""
    about = pair.second.trace.about
    numbers = {about.num_replicas, len(pair.second.copies), *about.mesh.values()}
    return sorted(numbers - {1})


def _split(array: np.ndarray, number: int, axis: int) -> list[np.ndarray]:
    """Returns parts along an axis as `torch.chunk` makes them: the last may be smaller."""
    size = -(-array.shape[axis] // number)
    return np.split(array, range(size, array.shape[axis], size), axis)


def _of_weight(
    pair: StepPair, name: str, before: np.ndarray, first: np.ndarray, second: np.ndarray
) -> Iterator[str]:
    """Yields sentences on a weight whose state is right."""
    for number, axis in itertools.product(_numbers(pair), range(before.ndim)):
        arrays = before, first, second
        parts = Parts(*(_split(array, number, axis) for array in arrays))
        where = f"of each of {number} parts along axis {axis}"
        if len(parts.before) < 2:
            continue
        if before.ndim == 2 and (why := _of_shape(parts.before[0], *arrays)):
            yield f"the update is scaled by {why} {where}"
        if (
            before.ndim == 2
            and not _factors_of(parts).size
            and any(
                _has_vectors_of_parts(matrix, first, second, number, axis)
                for matrix in _matrices(pair, name, before.shape)
            )
        ):
            yield f"the singular vectors of the update are those {where}, not of the whole matrix"


def _factors_of(parts: Parts) -> np.ndarray:
    """Returns the positive factor of each part's change; empty if a part does not have one."""
    pairs = [*zip(parts.first, parts.second, strict=True)]
    factors = np.array([factor_of([b], [a]) for a, b in pairs])
    fits = [norm(b - f * a) <= _CLOSE * norm(b) for f, (a, b) in zip(factors, pairs, strict=True)]
    return factors if all(fits) and np.all(factors > 0) else factors[:0]


def scaled_by_parts(
    pair: StepPair, changed: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> tuple[str, str] | None:
    """Returns cause and sentence if each rank's part of a weight changes by a factor of its own.

    Args:
        pair: the step.
        changed: see `from_parts`.
    """
    for number in _numbers(pair) if changed else ():
        found, telling = list[np.ndarray](), list[np.ndarray]()
        for arrays in changed.values():
            axes = range(arrays[0].ndim)
            cut = (Parts(*(_split(array, number, axis) for array in arrays)) for axis in axes)
            factors = next((f for f in map(_factors_of, cut) if f.size), np.array([]))
            found.append(factors)
            is_sure = np.count_nonzero(arrays[2]) >= _LEAST * factors.size > 0
            if is_sure and np.ptp(factors) > _CLOSE * max(factors):
                telling.append(factors)  # Some factor explains any single number.
        if not telling or not all(own.size for own in found):
            continue
        rates = max(telling, key=len)  # A small weight has parts on fewer ranks.
        listed = ", ".join(f"{factor:.4g}" for factor in rates)
        parts = f"{rates.size} parts of a weight"
        text = f"the updates of {parts} are {listed} times those of the first"
        are_equal = [
            abs(factor / rate - 1) <= _CLOSE
            for own in found
            for factor, rate in zip(own, rates, strict=False)
        ]
        if len(telling) > 1 and all(are_equal):
            why = "in all weights: each rank has a learning rate of its own"
            return "other_learning_rate", f"{text} recording, {why}"
        why = "as if each rank computed a size of the update from its part alone"
        return "updated_from_a_part", f"{text} recording, {why}"
    return None


def _of_shape(part: np.ndarray, before: np.ndarray, first: np.ndarray, second: np.ndarray) -> str:
    """Explains a common factor by the shape of a part; "" if it does not give it."""
    factor = factor_of([second], [first])
    if norm(second - factor * first) > _CLOSE * norm(second):
        return ""
    for text, scale in (
        ("the root of rows over columns", lambda r, c: max(1.0, r / c) ** 0.5),
        ("the root of rows over columns", lambda r, c: (r / c) ** 0.5),
        ("the root of the larger size", lambda r, c: max(r, c) ** 0.5),
    ):
        wanted = scale(*part.shape) / scale(*before.shape)
        if abs(wanted - 1) > _CLOSE and abs(factor - wanted) <= _CLOSE * wanted:
            return text
    return ""


def _matrices(pair: StepPair, name: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yields what a rule may have made a matrix of: its momentum, or the gradient."""
    for key in pair.first.trace.slots.get(name, {}).values():
        state = states_of(pair.first, key)[0]
        if state and state[1].shape == shape:
            yield state[1]
    yield dense(pair.gradients.reference_applied[name])


def _has_vectors_of_parts(
    matrix: np.ndarray, first: np.ndarray, second: np.ndarray, number: int, axis: int
) -> bool:
    """Returns whether an update has the singular vectors of parts, and the reference's of all."""
    if min(matrix.shape) < _LEAST or not _have_one_basis(matrix, first):
        return False
    if _have_one_basis(matrix, second):
        return False
    parts = zip(_split(matrix, number, axis), _split(second, number, axis), strict=True)
    return all(min(part.shape) >= _LEAST and _have_one_basis(part, own) for part, own in parts)


def _have_one_basis(matrix: np.ndarray, update: np.ndarray) -> bool:
    """Returns whether two matrices have the same singular vectors.

    With M = U s Vᵀ and an update U f(s) Vᵀ, Mᵀ · update = V (s f(s)) Vᵀ is symmetric, and so is
    update · Mᵀ.
    """
    allowed = _SYMMETRIC * norm(matrix) * norm(update)
    products = matrix.T @ update, update @ matrix.T
    return all(norm(product - product.T) <= allowed for product in products)


def _of_means(pair: StepPair, name: str, slots: Sequence[str]) -> str:
    """Explains state that has means of squared gradients along an axis, as that of Adafactor."""
    gradient = dense(pair.gradients.reference_applied[name])
    squares, keys = np.square(gradient), slots_of(pair, name, pair.in_second(name))
    if gradient.ndim != 2:
        return ""
    for number, slot in itertools.product(_numbers(pair), slots):
        if not any(_is_of_parts(pair, keys[slot], squares, number, axis) for axis in (0, 1)):
            return ""
    return "means of squared gradients are those of each rank's part"


def _is_of_parts(
    pair: StepPair, keys: tuple[str, str], squares: np.ndarray, number: int, axis: int
) -> bool:
    """Returns whether state follows the mean of squares along an axis, of each copy's part."""
    state, parts = states_of(pair.first, keys[0])[0], _split(squares, number, axis)
    states = states_of(pair.second, keys[1])
    if not state or not all(states) or len(parts) != len(states):
        return False
    old, new = state
    if new.shape != squares.mean(axis).shape:
        return False

    def terms(kept: np.ndarray, of: np.ndarray) -> list[Named]:
        return [{"": kept}, {"": of.mean(axis)}, {"": np.ones(new.shape)}]

    def is_sum(value: np.ndarray, by: Sequence[Named]) -> bool:
        total = sum(c * dense(term[""]) for c, term in zip(factors, by, strict=True))
        return norm(value - total) <= _CLOSE * norm(value)

    own = terms(old, squares)
    solved, known = solve({"": new}, own)
    factors = np.where(known & np.isfinite(solved), solved, 0.0)
    if not is_sum(new, own):
        return False
    known_states = [each for each in states if each]
    return all(
        is_sum(after, terms(before, part))
        for (before, after), part in zip(known_states, parts, strict=True)
    )
