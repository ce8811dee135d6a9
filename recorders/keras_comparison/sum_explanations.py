"""Explains a wrong sum of gradients."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from .distances import EPS, MARGIN, TINY, add, dense, is_within
from .tensor_explanations import why_tensor


def sum_bound(parts: Sequence[Any], unit: float = EPS) -> np.ndarray:
    """Returns the bound of each element's error by the order of summation, for a dtype's unit."""
    size = np.sum([np.abs(dense(part)) for part in parts], axis=0)
    return (len(parts) + 1) * unit * size + TINY


def why_sum(
    r: int | None,
    got: Any,
    parts: Sequence[Any],
    before: Sequence[tuple],
    known: list[np.ndarray],
) -> tuple[str, str, tuple[int, ...]]:
    """Explains a wrong sum: cause, text, and replicas if other than the one that has it.

    Args:
        r: the replica with the sum; None if all have it.
        got: the sum.
        parts: the gradients that each replica sent.
        before: sums of the previous step, and their possible rounding errors.
        known: factors of the replicas in the sums of other tensors; new ones are added.
    """
    num, sums, bound = len(parts), dense(got), sum_bound(parts)
    if sums.shape != bound.shape:
        return "unexplained", f"the sum has shape {sums.shape}, not {bound.shape}", ()
    if np.any(sums) and any(is_within(got, old, limit) for old, limit in before):
        return "stale_gradient", "the sum is that of the previous step", ()
    rows = np.stack([dense(part).ravel() for part in parts])
    simple = [np.full(num, 1 / num), *([] if r is None else [np.eye(num)[r]])]
    fitted = [np.linalg.lstsq(rows.T, sums.ravel(), rcond=None)[0]] if sums.size > num else []
    for factors in [*simple, *known, *fitted]:
        limit = MARGIN * max(1, float(np.abs(factors).max())) * bound
        if is_within(got, np.tensordot(factors, rows, 1).reshape(sums.shape), limit):
            known.append(factors)
            return why_factors(r, np.where(np.abs(factors) < 1e-3, 0, factors))
    for cause, text, candidate in reduced_sums(parts):
        if is_within(got, candidate, bound):
            return cause, text, ()
    if text := sum_of_some(sums, rows, bound):
        return "sparsified", text, ()
    return *why_tensor(got, add(parts), 0.0, num), ()


def why_factors(r: int | None, factors: np.ndarray) -> tuple[str, str, tuple[int, ...]]:
    """Explains a sum of the replicas' gradients with these factors."""
    num = len(factors)
    if np.allclose(factors, 1 / num, rtol=1e-3):
        text = f"the gradients are averaged over {num} replicas, not summed"
        return "mean_instead_of_sum", text, ()
    if r is not None and factors[r] and not np.any(np.delete(factors, r)):
        times = "" if abs(factors[r] - 1) < 1e-3 else f", multiplied by {factors[r]:.4g}"
        text = f"it is the gradient of this replica, not the sum over {num} replicas{times}"
        return "not_all_reduced", text, ()
    odd = tuple(int(q) for q in np.flatnonzero(np.abs(factors - 1) > 1e-3))
    if not np.any(factors):
        return "lost_replica", "the sum is 0", ()
    if odd and not any(factors[q] for q in odd):
        lost = ", ".join(map(str, odd))
        return "lost_replica", f"the sum does not contain the gradient of replica {lost}", odd
    shown = ", ".join(f"{factor:.{4 if odd else 8}g}" for factor in factors)
    text = f"the sum contains the replicas' gradients multiplied by {shown}"
    return "scaled_gradient", text, odd if len(odd) < num else ()


def reduced_sums(parts: Sequence[Any]) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields (cause, text, sum) for gradients that are sent in a lower precision."""
    arrays = [dense(part) for part in parts]

    def rounded(array: np.ndarray, dtype: tf.DType) -> np.ndarray:
        return tf.cast(tf.cast(tf.constant(array, tf.float32), dtype), tf.float32).numpy()

    for dtype in (tf.bfloat16, tf.float16):
        short = [rounded(array, dtype) for array in arrays]
        text = f"gradients are rounded to {dtype.name}"
        yield "reduced_precision", f"{text} before the sum", np.add.reduce(short, dtype=np.float64)
        added = short[0]
        for array in short[1:]:
            added = rounded(added + array, dtype)
        yield "reduced_precision", f"{text} and summed in it", added
        whole = rounded(np.sum(arrays, axis=0), dtype)
        yield "reduced_precision", f"the sum is rounded to {dtype.name}", whole
    for levels in (127, 128, 7):
        scales = [float(np.max(np.abs(array), initial=0)) / levels or 1.0 for array in arrays]
        sent = [np.round(a / scale) * scale for a, scale in zip(arrays, scales, strict=True)]
        bits = levels.bit_length() + 1 if levels & 1 else levels.bit_length()
        yield "quantised", f"gradients are quantised to {bits} bits", np.sum(sent, axis=0)
    signs = [np.sign(array) * np.mean(np.abs(array)) for array in arrays]
    yield "quantised", "gradients are quantised to their signs", np.sum(signs, axis=0)


def sum_of_some(sums: np.ndarray, rows: np.ndarray, bound: np.ndarray) -> str:
    """Returns in words whether each element is the sum of some replicas' elements; "" if not."""
    flat, limit, num = sums.ravel(), bound.ravel(), len(rows)
    if num > 8:
        return ""
    full, found = np.abs(rows.sum(axis=0) - flat) <= limit, np.zeros(flat.shape, bool)
    for subset in range(1 << num):
        chosen = [q for q in range(num) if subset >> q & 1]
        found |= np.abs(rows[chosen].sum(axis=0) - flat) <= limit
    if not found.all():
        return ""
    return f"in {np.mean(~full):.0%} of the elements, the part of some replicas is 0"
