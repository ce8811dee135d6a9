"""Explains differences by the random numbers that scripts draw, as far as they are recorded."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.answer.text import count
from lockstep.context import Context
from lockstep.explain.pairing import Matched
from lockstep.explain.solve import solve
from lockstep.numeric.arrays import Array, Named, dense, same_arrays, same_bits
from lockstep.reference import StepPair

OF_SCRIPT, OF_MODEL = "drawn", "drawn_inside"
Why = tuple[str, str, Sequence[int]]  # Cause, text, and numbers of replicas; empty for all.
_TELLING = 8  # Numbers; fewer may be equal by chance.
_CLOSE = 1e-3  # Relative; of solved factors.
_ALONG = 1e-5  # From 1, of the cosine of a difference and a gradient.


def drawn(step: Context, kind: str, shard: int) -> list[np.ndarray]:
    """Returns the random numbers of a kind that a shard draws in a step, in order."""
    found = step.trace.arrays(step.position, kind, shard) or []
    return [dense(array) for array in found]


def other_draws(pair: StepPair, kind: str) -> Why | None:
    """Explains a step by what it draws, in arrays like those of the reference.

    Replicas that each draw the numbers of their own examples have smaller arrays than the
    reference, and draw others than it rightly; but not equal ones.

    Args:
        pair: the step, which has a fault.
        kind: the kind of draws.
    """
    if len(pair.first.shards) > 1 or _are_of_no_account(pair, kind):
        return None
    right, step = drawn(pair.first, kind, 0), pair.second
    own = {shard: drawn(step, kind, shard) for shard in step.shards}
    whose = "the model draws in its forward pass" if kind == OF_MODEL else "the script draws"
    if again := _drawn_again(pair, kind, right, own):
        text = f"{again} that {whose} are those of an earlier step, which is not so in the first"
        return "random_numbers_repeated", f"{text} recording", ()
    if not right or any(len(each) != len(right) for each in own.values()):
        return None
    if numbers := _equal_parts(right, [*own.values()]):
        text = f"{_arrays(numbers, right)} that {whose} are the same on each replica, of which the"
        return "same_random_numbers", f"{text} first recording draws different parts", ()
    if any(not _are_alike(each, right) for each in own.values()):
        return None
    apart = [shard for shard, each in own.items() if _numbers_apart(each, right)]
    if not apart or len(apart) == len(own):  # All: another seed, as of another training.
        return None
    numbers = _numbers_apart(own[apart[0]], right)
    text = f"{_arrays(numbers, right)} that {whose} are not those of the first recording, and of"
    return "other_random_numbers", f"{text} other replicas", apart


def _arrays(numbers: Sequence[int], arrays: Sequence[np.ndarray]) -> str:
    return f"{len(numbers)} of {count('random array', len(arrays))}"


def _are_alike(own: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> bool:
    """Returns whether arrays have the shapes of others; what is used of empty ones is unknown."""
    pairs = zip(own, right, strict=True)
    return all(not each.size or each.shape == array.shape for each, array in pairs)


def _numbers_apart(own: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> list[int]:
    pairs = enumerate(zip(own, right, strict=True))
    return [i for i, (each, array) in pairs if each.size and not same_bits(each, array)]


def _is_telling(array: np.ndarray) -> bool:
    """Returns whether an array of random numbers is not equal to another one by chance."""
    return array.size >= _TELLING or bool(np.any(array != np.round(array)))


def _equal_parts(
    right: Sequence[np.ndarray], own: Sequence[Sequence[np.ndarray]]
) -> list[int]:  # fmt: skip
    """Returns the numbers of the arrays of which all replicas draw an equal part."""
    found = []
    for number, (array, parts) in enumerate(zip(right, zip(*own, strict=True), strict=True)):
        first, *others = parts
        if not (others and first.ndim and array.ndim and _is_telling(first)):
            continue
        is_split = len(array) == len(parts) * len(first) and array.shape[1:] == first.shape[1:]
        is_equal = is_split and all(same_bits(each, first) for each in others)
        if is_equal and not same_bits(array[: len(first)], array[len(first) :][: len(first)]):
            found.append(number)
    return found


def _are_of_no_account(pair: StepPair, kind: str) -> bool:
    """Returns whether an earlier step has the right gradients, and draws otherwise on replicas."""
    for earlier in pair.earlier():
        right, step = drawn(earlier.first, kind, 0), earlier.second
        differs = any(not same_arrays(drawn(step, kind, s), right) for s in step.shards)
        if differs and earlier.are_gradients_right:
            return True
    return False


def _drawn_again(
    pair: StepPair, kind: str, right: Sequence[np.ndarray], own: dict[int, list[np.ndarray]]
) -> str:
    """Says which arrays all replicas draw as in an earlier step, and the reference does not."""
    for earlier in pair.earlier():
        before, step = drawn(earlier.first, kind, 0), earlier.second
        again = [
            number
            for number, arrays in enumerate(zip(right, before, strict=False))
            if not same_bits(*arrays)
            and all(_is_again(each, drawn(step, kind, s), number) for s, each in own.items())
        ]
        if again:
            return _arrays(again, right)
    return ""


def _is_again(own: Sequence[np.ndarray], before: Sequence[np.ndarray], number: int) -> bool:
    if number >= min(len(own), len(before)) or not _is_telling(own[number]):
        return False
    return same_bits(own[number], before[number])


# --- Noise in gradients --------------------------------------------------------------------------


def noise_in_gradients(pair: StepPair) -> tuple[str, Why] | None:
    """Explains gradients that differ by a multiple of random arrays of their shapes.

    Returns:
        The stage, and why; None if they do not.
    """
    step, terms = pair.second, pair.gradients
    if len(pair.first.shards) > 1 or not terms.names:
        return None
    right, wrong = terms.reference_applied, [*terms.names]
    of_first = _noise(drawn(pair.first, OF_SCRIPT, 0), right)
    if not of_first:
        return None
    own = [_noise(drawn(step, OF_SCRIPT, s), right) for s in step.shards]
    if len(own) != len(terms.applied) or not all(own):
        return None
    are_equal = [_same(each, of_first) for each in own]
    factors = list[np.ndarray]()
    for applied, noise, is_equal in zip(terms.applied, own, are_equal, strict=True):
        arrays = [of_first] if is_equal else [of_first, noise]
        rest = {name: applied[name] - right[name] for name in wrong}
        found, known = solve(rest, arrays)
        expression = [(1.0, right), *zip(map(float, found), arrays, strict=True)]
        if not known.all() or not pair.tolerance.fits(applied, expression, wrong):
            return None
        factors.append(found)
    apart = [shard for shard, is_equal in enumerate(are_equal) if not is_equal]
    if not apart:
        more = [float(each[0]) for each in factors]
        if min(more) <= 0 or np.ptp(more) > _CLOSE * max(more) or len(own) < 2:
            return None
        text = f"gradients contain {more[0]:.4g} times the random numbers that all replicas draw"
        text += " alike, in addition to those in the first recording: each replica adds them"
        return "gradients", ("repeated_gradient", text, ())
    size = min(abs(factors[shard][1]) for shard in apart)
    if any(abs(each.sum()) > _CLOSE * size for each in factors):  # In place of the others.
        return None
    why = other_draws(pair, OF_SCRIPT)
    if why and why[0] == "random_numbers_repeated":
        return "random numbers", (why[0], f"{why[1]}: gradients contain them", ())
    text = f"gradients contain {factors[apart[0]][1]:.4g} times random numbers that"
    if len(apart) < len(own):
        text += " these replicas alone draw, which other replicas and the first recording do not"
        return "all-reduce", ("diverged_replicas", text, apart)
    text += " the first recording does not draw"
    return "random numbers", ("other_random_numbers", text, ())


def _noise(arrays: Sequence[np.ndarray], weights: Named) -> Named:
    """Returns the random array of each weight, in their order; empty if some have none."""
    flat = sum(np.size(each) for each in weights.values())
    for array in arrays:
        if array.shape == (flat,):
            ends = np.cumsum([np.size(each) for each in weights.values()])[:-1]
            parts = zip(weights.items(), np.split(array, ends), strict=True)
            return {name: part.reshape(np.shape(each)) for (name, each), part in parts}
    left, found = [*arrays], Named()
    for name, weight in weights.items():
        number = next((i for i, a in enumerate(left) if a.shape == np.shape(weight)), None)
        if number is None:
            return {}
        found[name] = left.pop(number)
    return found


def _same(first: Named, second: Named) -> bool:
    return all(same_bits(first[name], second[name]) for name in second)


# --- Targets that are noise ----------------------------------------------------------------------


def drawn_targets(step: Context, shard: int, output: Array, gradient: Array) -> np.ndarray | None:
    """Returns the random array of each row of outputs from which a squared error is taken.

    Its gradient is a multiple of output - target. Rows may be any of an array that a script drew.

    Args:
        step: the step.
        shard: what has the outputs.
        output, gradient: outputs `(n, …)`, and the gradients of the loss by them.
    """
    y, g = (dense(each).reshape(len(each), -1) for each in (output, gradient))
    if y.shape[1] < 3 or not np.all(np.any(g, axis=1)):
        return None
    for array in _rows_like(step, shard, np.shape(output)[1:]):
        along = np.sum(y * g, axis=1)[:, None] - g @ array.T
        squares = np.sum(y * y, axis=1)[:, None] - 2 * y @ array.T + np.sum(array**2, axis=1)
        sizes = np.sqrt(np.maximum(squares, 0)) * np.linalg.norm(g, axis=1)[:, None]
        cosines = np.divide(along, sizes, out=np.zeros_like(along), where=sizes > 0)
        if np.all(np.max(cosines, axis=1) > 1 - _ALONG):
            return np.asarray(array[np.argmax(cosines, axis=1)])
    return None


def _rows_like(step: Context, shard: int, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    for kind in (OF_SCRIPT, OF_MODEL):
        for array in drawn(step, kind, shard):
            if array.shape[1:] == shape and len(array):
                yield array.reshape(len(array), -1)


def equal_outputs(pair: StepPair, matched: Sequence[Matched]) -> Why | None:
    """Explains replicas that return an equal array for other examples, as masks that are drawn.

    In the first recording, the same examples have different rows of it.
    """
    if len({m.shard for m in matched}) < len(matched):
        return None
    for kind in ("y_other", "y_pred"):
        for first, second in itertools.combinations(matched, 2):
            pairs = zip(first.pairs[kind], second.pairs[kind], strict=False)
            for number, ((a, own), (b, other)) in enumerate(pairs, start=1):
                if own.size >= _TELLING and same_bits(own, other) and not same_bits(a, b):
                    items = first.shard, second.shard
                    text = "these replicas return the same numbers in array"
                    what = "of whole numbers or booleans" if kind == "y_other" else "of outputs"
                    text += f" {number} {what}, for other examples; in the first recording, these"
                    return "same_random_numbers", f"{text} have different ones", items
    return None
