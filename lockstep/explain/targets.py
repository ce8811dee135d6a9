"""Reads targets off the gradient of a loss with respect to its outputs, and explains other ones."""

import collections
from collections.abc import Sequence

import numpy as np

from lockstep.numeric.arrays import fitted, length, unit_of

NO_TARGET = -1  # Of outputs that do not count in the loss.
_FITS = 1e-3  # Relative.


def targets_of(output: np.ndarray, gradient: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the class of each output, and label smoothing, that give a gradient of a loss.

    The gradient of cross-entropy is w · (softmax(y) - t), and of its binary form
    w · (sigmoid(y) - t), with a weight w. It is read only if one of them fits all outputs.

    Args:
        output: outputs y, `(n, …)`, logits.
        gradient: the gradient of the loss with respect to them.

    Returns:
        Classes `(n, m)`, or `NO_TARGET`; without columns if the loss has another form. Smoothing.
    """
    fits = max(_FITS, 8 * unit_of(gradient), 8 * unit_of(output))
    for axis in dict.fromkeys((output.ndim - 1, 1)):
        if 0 < axis < output.ndim and output.shape[axis] > 1:
            rows = [np.moveaxis(a, axis, -1) for a in (output, gradient)]
            y, g = (a.reshape(-1, a.shape[-1]).astype(np.float64) for a in rows)
            if found := _softmax(y, g, fits):
                return found[0].reshape(len(output), -1), found[1]
    y, g = output.astype(np.float64), gradient.astype(np.float64)
    used, target = g != 0, g < 0
    with np.errstate(over="ignore"):
        apart = 1 / (1 + np.exp(-y)) - target
    if used.any() and _is_multiple(g[used], apart[used], fits):
        return np.where(used, target, NO_TARGET).reshape(len(output), -1), 0.0
    return np.zeros((len(output), 0)), 0.0


def _softmax(y: np.ndarray, g: np.ndarray, fits: float) -> tuple[np.ndarray, float] | None:
    """Reads the classes of rows of logits; None if it is not the loss."""
    used = np.any(g, axis=1)
    size = np.abs(g).sum(1)
    if not used.any() or np.any(np.abs(g.sum(1)) > fits * size):
        return None
    p = np.exp(y - y.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    target = g.argmin(1)
    others = used[:, None] & (np.arange(y.shape[1]) != target[:, None])
    classes = np.where(used, target, NO_TARGET)
    x, z = p[others], g[others]
    # Of other classes than the target, it is w · p - w · ε / K with label smoothing ε.
    columns = np.stack([x, -np.ones_like(x)], axis=1)
    weight, shift = fitted(columns, z)
    if len(x) > 2 and weight > 0 and length(columns @ (weight, shift) - z) <= fits * length(z):
        smoothing = float(shift * y.shape[1] / weight)
        return classes, smoothing if smoothing > fits else 0.0
    if y.shape[1] > 2:  # Each row may have a weight of its own.
        rest = np.where(others, p, 0.0)
        own = (g * rest).sum(1) / np.maximum((rest * rest).sum(1), np.finfo(float).tiny)
        if length((own[:, None] * rest - g)[others]) <= fits * length(z) and np.all(own >= 0):
            return classes, 0.0
    return None


def _is_multiple(g: np.ndarray, x: np.ndarray, fits: float) -> bool:
    squares = float(np.sum(x * x))
    weight = float(np.sum(g * x)) / squares if squares else 0.0
    return len(g) > 2 and weight > 0 and length(g - weight * x) <= fits * length(g)


def why_targets(pairs: Sequence[tuple[np.ndarray, np.ndarray]], other: str) -> tuple[str, str]:
    """Returns cause and text for targets that belong to other examples, or are different.

    Args:
        pairs: arrays of both recordings `(n, m)` for the same examples; they differ.
        other: cause of targets that no example of the batch has.
    """
    unequal = [(a, b) for a, b in pairs if not np.array_equal(a, b)]
    wrong = [(a[i], b[i], i) for a, b in unequal for i in np.flatnonzero(np.any(a != b, axis=1))]
    total = sum(len(a) for a, _ in pairs)
    if all(_rows(a) == _rows(b) for a, b in unequal):
        text = f"{len(wrong)} of {total} examples have the target of another example"
        return "labels_shifted", text
    if all(a.shape[1] > 2 and _is_moved(a, b) for a, b in unequal):
        return "labels_shifted", "targets are those of another place in the same sequence"
    a, b, row = wrong[0]
    place = int(np.flatnonzero(a != b)[0])
    first, second = (f"{x[place]:.6g}" if x[place] != NO_TARGET else "none" for x in (a, b))
    shown = f"example {row}: {first} in the first recording, {second} here"
    if all(np.array_equal(np.float32(a.astype(np.float16)), np.float32(b)) for a, b in unequal):
        return other, f"they are rounded to float16; {shown}"
    return other, f"{len(wrong)} of {total} examples have other targets; {shown}"


def _rows(array: np.ndarray) -> collections.Counter:
    return collections.Counter(map(bytes, np.ascontiguousarray(array)))


def _is_moved(first: np.ndarray, second: np.ndarray) -> bool:
    """Returns whether sequences are moved by one place."""
    forth, back = (first[:, 1:], second[:, :-1]), (first[:, :-1], second[:, 1:])
    return any(np.array_equal(a, b) for a, b in (forth, back))
