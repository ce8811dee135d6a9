"""Describes the parts of arrays that devices hold, to predict faults of a single device."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lockstep.arithmetic import dense, factor_of, length
from lockstep.context import Context
from lockstep.trace import Named


def bounds(size: int, num: int) -> list[tuple[int, int]]:
    """Returns the ranges of `num` nearly equal parts; the first ones are larger."""
    sizes = [size // num + (part < size % num) for part in range(num)]
    return [(sum(sizes[:part]), sum(sizes[: part + 1])) for part in range(num)]


def parts_of(context: Context, shape: Sequence[int]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields, in words, the elements and the channels that each device may hold, and a mask."""
    about, size = context.trace.about, int(np.prod(shape, dtype=int))
    for num in sorted({len(about.parts), len(about.parts) // about.num_replicas} - {0, 1}):
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
    about, flat = context.trace.about, array.ravel()
    for num in sorted({len(about.parts), len(about.parts) // about.num_replicas} - {0, 1}):
        ranges = [flat[start:end] for start, end in bounds(flat.size, num)]
        for shift in range(1, num):
            moved = [np.resize(ranges[(d + shift) % num], ranges[d].size) for d in range(num)]
            text = f"each device's elements are those of the device {shift} further on"
            yield text, np.concatenate(moved).reshape(array.shape)
