"""Bounds of sampled variables: their elements are judged as others, their random sums by a norm.

A sample is a vector: some elements, then ±1 sums of all of them. What is linear in elements holds
for sums as well; of an update that is not, as Adam's, a sum is known less exactly.
"""

import numpy as np

from lockstep.data.trace import STATE
from lockstep.engine.pair import Pair, Variable
from lockstep.numeric import state_bounds as bounds
from lockstep.numeric.arrays import Array, dense, norm

LINEAR = "SGD"  # The family of rules whose updates are linear in the gradient.


def spread_of(
    first: Array | None, second: Array | None, allowed: float, decay: np.ndarray | float,
    num_sums: int, *, is_linear: bool,
) -> np.ndarray:  # fmt: skip
    """Returns ρ for each element of a sampled gradient, then that of its sums.

    Args:
        first, second: the gradient in the reference and in the training; None if unknown.
        allowed: its relative difference that rounding can cause; 0 if the gradients do not agree.
        decay: what the rule adds to the gradient before it uses it.
        num_sums: the number of sums.
        is_linear: whether the variable's change is linear in the gradient.
    """
    apart = bounds.distance_of_gradients(first, second, allowed)
    own, other = (None if x is None else dense(x)[:-num_sums] for x in (first, second))
    own_decay = np.asarray(decay)[:-num_sums] if np.ndim(decay) else decay
    spread = bounds.spread_of(own, other, allowed, own_decay)
    of_sums = apart if is_linear else bounds.spread_of_sums(spread, apart)
    if not spread.ndim:
        return spread if is_linear else np.asarray(max(float(spread), of_sums))
    return np.append(spread, np.full(num_sums, of_sums))


def is_linear(pair: Pair, variable: Variable) -> bool:
    """Returns whether the change of a variable is known to be linear in its gradient."""
    rule = pair.rule(variable.weight)
    return variable.kind == STATE or (rule is not None and rule.family == LINEAR)


def mean_size(pair: Pair, variable: Variable, size: np.ndarray, num_sums: int) -> float:
    """Returns the root mean square of all elements of a sampled statistic."""
    number = np.prod(pair.reference.trace.variables[variable.first].shape)
    return float(norm(size[-num_sums:]) / number**0.5)
