"""Explains one wrong tensor, and describes its parts on the devices and in lower precision."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.context import Context
from lockstep.numeric.arrays import (
    EPS,
    NOTHING_BUT_ROUNDING,
    Named,
    dense,
    factor_of,
    length,
    ratio,
)

BITS = (8, 4)  # Of quantised gradients.
_LISTED = 4
_AT_LIMIT, _SCALED = 8, 1e-5  # Elements of one size, relative: they were clipped to it.
_FEW = 4  # Numbers of which chance makes each a whole multiple, within rounding, in one of 10,000.


def why_tensor(
    actual: Any,
    expected: Any,
    limit: float,
    num_replicas: int,
    of_device: tuple[str, str] | None = None,
) -> tuple[str, str]:
    """Explains one wrong gradient independently of other replicas and tensors.

    Args:
        actual, expected: the arrays.
        limit: Euclidean distance that rounding can cause.
        num_replicas: number of replicas.
        of_device: what explains the part of one device; comes before its rows and columns.
    """
    a, e = dense(actual), dense(expected)
    if a.shape != e.shape:
        return "unexplained", f"the gradient has shape {a.shape}, not {e.shape}"
    if not np.any(a):
        return "frozen", "all elements of the gradient are 0"
    limit = max(limit, 64 * EPS * length(e))
    factor, apart = factor_of([a], [e]), ratio(length(a - e), length(e))
    unknown = (
        f"the relative difference is {apart:.2g}; no scale, shift, other examples, previous step,"
        " regularisation, precision or lost element explains it"
    )
    if limit > NOTHING_BUT_ROUNDING * length(a - e):  # What follows would explain rounding, too.
        return "unexplained", unknown
    if a.size > 1 and length(a - factor * e) <= abs(factor) * limit:
        known = {
            1 / num_replicas: " (1 / number of replicas)",
            num_replicas: " (the number of replicas)",
        }
        why = next((text for k, text in known.items() if abs(factor / k - 1) < 1e-3), "")
        if np.count_nonzero(e) < 2 and not why:  # One number is some multiple of any other.
            return "unexplained", f"it is {factor:.4g} times what it should be, in one element"
        return (
            "scaled_gradient",
            f"the gradient is {factor:.4g} times as large as it should be{why}",
        )
    kept = a != 0
    if np.mean(kept) < 0.9 and length((a - e)[kept]) <= limit:
        return (
            "sparsified",
            f"{np.mean(~kept):.0%} of the gradient's elements are 0, all others are right",
        )
    largest = float(np.max(np.abs(a)))
    is_partly_clipped = np.any(np.abs(e) < largest)
    if is_partly_clipped and length(a - np.clip(e, -largest, largest)) <= limit:
        text = f"the gradient's elements are clipped to values of {largest:.4g}"
        size = float(np.max(np.abs(e)))
        if np.count_nonzero(np.abs(e) >= size * (1 - _SCALED)) >= _AT_LIMIT:
            return "other_clipping", f"{text}, and of {size:.4g} where it is right"
        return "clipped_before_the_sum", text
    cause = _why_rounded(a, e, limit) or of_device or why_part(a, e, limit)
    return cause or ("unexplained", unknown)


def _why_rounded(a: np.ndarray, e: np.ndarray, limit: float) -> tuple[str, str] | None:
    """Explains a gradient that is rounded to fewer bits; None if it is not."""
    for name, bits in (("bfloat16", 16), ("float16", 13)):
        if has_short_mantissa(a, bits) and length(a - e) <= 2.0 ** (bits - 23) * length(e):
            return "reduced_precision", f"the gradient is rounded to {name}"
    for bits in BITS:
        if _is_rounded_to_levels(a, e, bits, limit):
            return "quantised", f"the gradient is rounded to whole multiples, in {bits} bits"
    if length(a - to_signs(e)) <= limit:
        return "quantised", "the gradient has the signs of the right one, and its mean size"
    return None


def why_part(actual: Any, expected: Any, limit: float) -> tuple[str, str] | None:
    """Explains an array of which only a few rows, columns or elements are wrong, or says which.

    Args:
        actual, expected: the arrays.
        limit: Euclidean distance that rounding can cause.
    """
    a, e = dense(actual), dense(expected)
    if a.shape != e.shape or not a.ndim or not np.isfinite(a).all():
        return None
    parts = [*_wrong_parts(np.square(a - e), limit)]
    if not parts:
        return None
    shown, wrong = min(parts, key=lambda part: np.count_nonzero(part[1]))
    own, right = a[wrong], e[wrong]
    if not np.any(own):
        return "frozen", f"the gradient is 0 in {shown}, and right elsewhere"
    factor = factor_of([own], [right])
    is_clear = limit <= NOTHING_BUT_ROUNDING * length(own - right)  # Else, a factor fits rounding.
    is_factor = length(own - factor * right) <= abs(factor) * limit
    if is_clear and is_factor and np.count_nonzero(right) >= _FEW:
        times = f"{factor:.4g} times what it should be"
        return "scaled_gradient", f"the gradient is {times} in {shown}, and right elsewhere"
    return "unexplained", (
        f"the gradient is wrong in {shown}, where the relative difference is"
        f" {ratio(length(own - right), length(right)):.2g}, and right elsewhere"
    )


def _wrong_parts(squares: np.ndarray, limit: float) -> Iterator[tuple[str, np.ndarray]]:
    """Yields, in words, the rows, columns or elements without which an array is right; a mask.

    Args:
        squares: squares of the differences.
        limit: Euclidean distance that rounding can cause.
    """
    axes = range(squares.ndim)
    for what, kept in (("row", axes[:1]), ("column", axes[-1:]), ("element", axes)):
        if squares.ndim < 2 and what != "element":
            continue
        sizes = np.sum(squares, axis=tuple(axis for axis in axes if axis not in kept))
        order = np.argsort(sizes, axis=None)
        number = sizes.size - np.count_nonzero(np.cumsum(sizes.ravel()[order]) <= limit**2)
        if not 0 < number <= sizes.size / 2:
            continue
        wrong = np.zeros(sizes.size, bool)
        wrong[order[sizes.size - number :]] = True
        wrong = wrong.reshape([n if axis in kept else 1 for axis, n in enumerate(squares.shape)])
        yield _named_parts(what, wrong), np.broadcast_to(wrong, squares.shape)


def _named_parts(what: str, wrong: np.ndarray) -> str:
    """Returns "row 3 of 20", or "2 of 20 rows (3, 7)"."""
    number, long = np.count_nonzero(wrong), [axis for axis, n in enumerate(wrong.shape) if n > 1]
    places = [tuple(int(place[axis]) for axis in long) for place in np.argwhere(wrong)]
    listed = [str(place[0] if len(place) == 1 else place) for place in places[:_LISTED]]
    if number == 1:
        return f"{what} {listed[0]} of {wrong.size}"
    more = ", …" if number > _LISTED else ""
    return f"{number} of {wrong.size} {what}s ({', '.join(listed)}{more})"


def levels_of(bits: int) -> tuple[int, ...]:
    """Returns how many levels above 0 numbers of some bits have: with or without the lowest one."""
    most = 1 << (bits - 1)
    return most - 1, most


def to_levels(array: np.ndarray, levels: int) -> np.ndarray:
    """Rounds to whole multiples of the largest absolute value over the number of levels."""
    scale = float(np.max(np.abs(array), initial=0)) / levels or 1.0
    return np.asarray(np.round(array / scale) * scale)


def to_signs(array: np.ndarray) -> np.ndarray:
    """Returns the signs of an array, times the mean of the absolute values."""
    return np.asarray(np.sign(array) * np.mean(np.abs(array)))


def _is_rounded_to_levels(actual: np.ndarray, right: np.ndarray, bits: int, limit: float) -> bool:
    """Returns whether an array has whole multiples of a scale, each next to the right number.

    The scale is that of the array itself. The largest number is a multiple in any case, and so are
    0 and its opposite: others have to show it.
    """
    largest = float(np.max(np.abs(actual)))
    if np.count_nonzero((actual != 0) & (np.abs(actual) != largest)) < _FEW:
        return False
    for levels in levels_of(bits):
        scale = largest / levels
        whole = np.round(actual / scale)
        is_whole = np.abs(actual - whole * scale) <= 4 * EPS * np.abs(actual)
        if is_whole.all() and np.all(np.abs(actual - right) <= scale / 2 + limit):
            return True
    return False


def has_short_mantissa(array: np.ndarray, bits: int) -> bool:
    """Returns whether the last `bits` bits of all float32 mantissas are 0."""
    numbers = array.astype(np.float32)
    return bool(np.all(numbers == array)) and not np.any(
        numbers.view(np.uint32) & ((1 << bits) - 1)
    )


def bounds(size: int, num: int) -> list[tuple[int, int]]:
    """Returns the ranges of `num` nearly equal parts; the first ones are larger."""
    sizes = [size // num + (part < size % num) for part in range(num)]
    return [(sum(sizes[:part]), sum(sizes[: part + 1])) for part in range(num)]


def numbers_of_devices(context: Context) -> list[int]:
    """Returns over how many devices an array may be split: those of a replica, or all."""
    about = context.trace.about
    return sorted({len(about.parts), len(about.parts) // about.num_replicas} - {0, 1})


def parts_of(context: Context, shape: Sequence[int]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields, in words, the elements and the channels that each device may hold, and a mask."""
    size = int(np.prod(shape, dtype=int))
    for num in numbers_of_devices(context):
        for device, (start, end) in enumerate(bounds(size, num)):
            mask = np.zeros(size, bool)
            mask[start:end] = True
            yield f"the elements of device {device} of {num}", mask.reshape(shape)
        for device, (start, end) in enumerate(bounds(shape[-1], num) if shape else ()):
            mask = np.zeros(shape, bool)
            mask[..., start:end] = True
            yield f"the channels of device {device} of {num}", mask


def mixed(
    context: Context, right: Named, other: Named, names: Sequence[str]
) -> Iterator[tuple[str, Named]]:
    """Yields arrays of which one device's part is another one, in words and by name."""
    found: dict[str, Named] = {}
    for name in names:
        for text, mask in parts_of(context, np.shape(right[name])):
            changed = np.where(mask, dense(other[name]), right[name])
            found.setdefault(text, {})[name] = changed.astype(np.asarray(right[name]).dtype)
    yield from found.items()


def factor_of_part(
    context: Context, actual: Any, expected: Any, limit: float
) -> tuple[str, str] | None:
    """Explains a tensor of which one device's part is multiplied by a factor."""
    a, e = dense(actual), dense(expected)
    if a.shape != e.shape or not np.isfinite(a).all():
        return None
    for text, mask in parts_of(context, a.shape):
        factor = factor_of([a[mask]], [e[mask]])
        if np.count_nonzero(e[mask]) < 2 and factor:
            continue  # One number is some multiple of any other.
        if not np.isfinite(factor) or abs(factor - 1) < 1e-3:
            continue
        predicted = np.where(mask, factor * e, e)
        if length(a - predicted) <= max(1, abs(factor)) * limit:
            if abs(factor) < 1e-6:
                return "frozen", f"{text} are 0"
            return "scaled_gradient", f"{text} are {factor:.4g} times as large as they should be"
    return None


def moved_parts(context: Context, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields an array whose parts are each that of another device, in words."""
    flat = array.ravel()
    for num in numbers_of_devices(context):
        ranges = [flat[start:end] for start, end in bounds(flat.size, num)]
        for shift in range(1, num):
            moved = [np.resize(ranges[(d + shift) % num], ranges[d].size) for d in range(num)]
            text = f"each device's elements are those of the device {shift} further on"
            yield text, np.concatenate(moved).reshape(array.shape)


def moved_in_bucket(
    right: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yields arrays of one flat bucket, taken out of it in another order or place, in words."""
    if len(right) < 2 or any(np.shape(got[name]) != array.shape for name, array in right.items()):
        return
    for packed, unpacked in itertools.product([[*right], [*right][::-1]], repeat=2):
        bucket = np.concatenate([right[name].ravel() for name in packed])
        taken = np.concatenate([got[name].ravel() for name in unpacked])
        # Where the largest element is tells how far the bucket has moved.
        shift = int(np.argmax(np.abs(taken)) - np.argmax(np.abs(bucket)))
        text = "gradients are taken out of a bucket in another order than they were put into it"
        if packed == unpacked:
            text = f"the gradients of a bucket are moved by {abs(shift)} elements"
        parts = np.split(np.roll(bucket, shift), np.cumsum([right[n].size for n in unpacked])[:-1])
        values = {n: p.reshape(right[n].shape) for n, p in zip(unpacked, parts, strict=True)}
        if packed != unpacked or shift:
            yield text, values


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """Rounds float32 to bfloat16, ties to even; the result is float32."""
    words = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (words + 0x7FFF + ((words >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).reshape(np.shape(array))


def to_float16(array: np.ndarray) -> np.ndarray:
    """Rounds float32 to float16; the result is float32."""
    with np.errstate(over="ignore"):
        return np.asarray(array, np.float32).astype(np.float16).astype(np.float32)


SHORT = {"bfloat16": to_bfloat16, "float16": to_float16}
