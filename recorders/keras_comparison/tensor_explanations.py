"""Explains one wrong gradient."""

from typing import Any

import numpy as np

from .distances import EPS, dense, factor_of, ratio_of


def why_tensor(actual: Any, expected: Any, limit: float, num_replicas: int) -> tuple[str, str]:
    """Explains one wrong gradient independently of other replicas and tensors."""
    a, e = dense(actual), dense(expected)
    if a.shape != e.shape:
        return "unexplained", f"the gradient has shape {a.shape}, not {e.shape}"
    if not np.any(a):
        return "frozen", "all elements of the gradient are 0"
    limit = max(limit, 64 * EPS * float(np.linalg.norm(e)))
    factor = factor_of([a], [e])
    if np.linalg.norm(a - factor * e) <= abs(factor) * limit:
        known = {
            1 / num_replicas: " (1 / number of replicas)",
            num_replicas: " (the number of replicas)",
        }
        why = next((text for k, text in known.items() if abs(factor / k - 1) < 1e-3), "")
        return (
            "scaled_gradient",
            f"the gradient is {factor:.4g} times as large as it should be{why}",
        )
    kept = a != 0
    if np.mean(kept) < 0.9 and np.linalg.norm((a - e)[kept]) <= limit:
        return (
            "sparsified",
            f"{np.mean(~kept):.0%} of the gradient's elements are 0, all others are right",
        )
    for name, bits in (("bfloat16", 16), ("float16", 13)):
        if has_short_mantissa(a, bits) and np.linalg.norm(a - e) <= 2.0 ** (
            bits - 23
        ) * np.linalg.norm(e):
            return "reduced_precision", f"the gradient is rounded to {name}"
    if len(np.unique(a)) <= min(256, a.size // 4):
        return "quantised", f"the {a.size} elements have only {len(np.unique(a))} different values"
    apart = ratio_of(float(np.linalg.norm(a - e)), float(np.linalg.norm(e)))
    return (
        "unexplained",
        f"the relative difference is {apart:.2g}; no scale, shift, other examples, previous step,"
        " regularisation, precision or lost element explains it",
    )


def has_short_mantissa(array: np.ndarray, bits: int) -> bool:
    """Returns whether the last `bits` bits of all float32 mantissas are 0."""
    numbers = array.astype(np.float32)
    return bool(np.all(numbers == array)) and not np.any(
        numbers.view(np.uint32) & ((1 << bits) - 1)
    )
