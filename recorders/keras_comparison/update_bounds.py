"""Computes the effect of rounding on the optimizer's update."""

from typing import Any

import numpy as np

from .context import StepContext
from .distances import MARGIN, TINY, dense
from .recorder_imports import Arrays, Sparse


def rounding_bounds(context: StepContext, before: Arrays, sums: Arrays) -> Arrays:
    """Returns the possible rounding error of each element of the optimizer's update.

    Repeats the update from gradients and states changed by one ULP.
    """
    generator, units = np.random.default_rng(context.position), context.one.units
    units_of_sums = [units[context.paths.index(path)] for path in context.recording.gradients]
    base = context.updated(before, sums)
    apart = [np.zeros(array.shape) for array in base]

    def size(array: Any) -> np.ndarray:
        return np.abs(np.where(np.isfinite(array), dense(array), 0))

    for _ in range(3):

        def near(array: Any, unit: float) -> Any:
            if isinstance(array, Sparse):
                return array._replace(values=near(array.values, unit))
            if not np.issubdtype(array.dtype, np.floating):
                return array
            return array * (1 + unit * generator.choice([-1, 1], array.shape)).astype(array.dtype)

        kinds = zip(before, context.kinds, units, strict=True)
        # Step counters of schedules and accumulated factors are not changed.
        state = [near(a, u) if kind != "seed" and a.ndim else a for a, kind, u in kinds]
        moved_on = context.updated(state, list(map(near, sums, units_of_sums)))
        for i, array in enumerate(moved_on):
            moved = np.abs(dense(array) - dense(base[i]))
            apart[i] = np.maximum(apart[i], np.where(np.isfinite(moved), moved, 0))
    return [
        MARGIN * (a + np.sqrt(np.mean(a**2)) + unit * (size(b) + size(o))) + TINY
        for a, b, o, unit in zip(apart, base, before, units, strict=True)
    ]
