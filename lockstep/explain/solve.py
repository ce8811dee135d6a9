"""Finds the coefficients with which recorded arrays are sums of others, from a Gram matrix.

The Gram matrix of the terms is added over all tensors of a group and solved once: it *selects*.
Each result is *confirmed* by a pass over the elements, with the bounds of `numeric.tolerance`.
"""

from collections.abc import Sequence

import numpy as np

from lockstep.numeric.arrays import Named, dense

_DEPENDENT = 1e-10  # Eigenvalues of a Gram matrix of unit terms: collinear below it.
_LOST = 1e-3  # Part of a term in directions that others give, from which on it is not determined.
_FEWEST = 2  # Elements for each term, below which a tensor may confirm, and not select.


def solve(
    observed: Named, terms: Sequence[Named], names: Sequence[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the coefficients of the terms, and which of them the arrays determine.

    Of terms that are 0, or that others give, as of equal shards, the coefficients of least norm
    are returned, and said to be not determined. All are NaN if an array is not finite.

    Args:
        observed: arrays that are sums of the terms.
        terms: arrays by the same names; missing ones are 0.
        names: the arrays to use; None for all.

    Returns:
        Coefficients `(k,)`, and booleans `(k,)`.
    """
    num, number_of_elements = len(terms), 0
    gram, right = np.zeros((num, num)), np.zeros(num)
    for name in observed if names is None else names:
        flat = dense(observed[name]).ravel()
        rows = [dense(t[name]).ravel() if name in t else np.zeros(flat.size) for t in terms]
        if any(row.shape != flat.shape for row in rows):
            return np.full(num, np.nan), np.zeros(num, bool)
        columns = np.stack(rows) if rows else np.zeros((0, flat.size))
        if not (np.isfinite(columns).all() and np.isfinite(flat).all()):
            return np.full(num, np.nan), np.zeros(num, bool)
        gram += columns @ columns.T
        right += columns @ flat
        number_of_elements += int(np.count_nonzero(np.any(columns != 0, axis=0)))
    scale = np.sqrt(np.diag(gram))
    used = scale > 0
    if not used.any():
        return np.zeros(num), np.zeros(num, bool)
    scale = np.where(used, scale, 1.0)
    values, vectors = np.linalg.eigh(gram / scale[:, None] / scale)
    kept = values > _DEPENDENT
    of_unit = vectors[:, kept] @ ((vectors[:, kept].T @ (right / scale)) / values[kept])
    lost = np.abs(vectors[:, ~kept]).max(axis=1) if (~kept).any() else np.zeros(num)
    is_enough = number_of_elements >= _FEWEST * num
    return np.where(used, of_unit / scale, 0.0), (lost < _LOST) & used & is_enough


def is_large(array: np.ndarray, num_terms: int) -> bool:
    """Returns whether an array has enough elements to tell its coefficients."""
    return int(np.count_nonzero(array)) >= _FEWEST * num_terms
