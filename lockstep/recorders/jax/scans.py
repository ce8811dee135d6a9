"""What a compiled step keeps several times, as in a scan over micro-batches, layers or time.

The arrays of its iterations become those of one call with all examples.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Calls = Sequence[Sequence[np.ndarray]]  # The arrays of each call.


def mark_of(tree: Any) -> jax.Array:
    """Returns a number by which the gradient of these arrays is known to be that of their call.

    A scan computes the gradients of its iterations in reverse order.
    """
    found = jnp.zeros(())
    for leaf in jax.tree.leaves(jax.lax.stop_gradient(tree)):
        weights = jnp.sin(1.0 + jnp.arange(leaf.shape[-1])) if jnp.ndim(leaf) else 1.0
        found += jnp.sum(jnp.real(leaf) * weights)
    return found


@jax.custom_batching.custom_vmap
def place_of(mark: Any) -> jax.Array:
    """Returns the place of an array in the axis of `jax.vmap`, in which calls have no order."""
    return jnp.zeros((), jnp.int32)


@place_of.def_vmap
def _place_in_batch(size: int, is_batched: Any, marks: Any) -> tuple[jax.Array, bool]:
    return place_of(marks[0]) * size + jnp.arange(size, dtype=jnp.int32), True


def in_groups(calls: Sequence[tuple[int, Sequence[np.ndarray]]]) -> Calls:
    """Returns the arrays of each call, given with its place; one for all places of `jax.vmap`."""
    size = max(place for place, _ in calls) + 1
    if size == 1 or len(calls) % size:
        return [arrays for _, arrays in calls]
    groups = [sorted(calls[i : i + size], key=lambda c: c[0]) for i in range(0, len(calls), size)]
    return [[*map(np.stack, zip(*(own for _, own in group), strict=True))] for group in groups]


def in_order(outputs: Calls, gradients: Calls) -> tuple[Calls, Calls]:
    """Returns outputs and their gradients by calls, in the order of the outputs.

    The last array of each call is its mark. A call that is checkpointed is computed twice.
    """
    if 0 < len(gradients) < len(outputs):
        known = {call[-1].tobytes(): call for call in reversed(outputs)}
        outputs = [call for call in outputs if known[call[-1].tobytes()] is call]
    places = {call[-1].tobytes(): place for place, call in enumerate(outputs)}
    order = sorted(gradients, key=lambda call: places.get(call[-1].tobytes(), len(places)))
    return [call[:-1] for call in outputs], [call[:-1] for call in order]


def joined(calls: Calls, num_examples: int, *, is_module: bool = False) -> list[np.ndarray]:
    """Returns the arrays of all calls.

    Calls with parts of the batch have rows of it, which are put together. Those with words are
    stacked behind the axis of examples; of a module, they are calls of their own. What has no rows
    of examples is listed call by call.

    Args:
        calls: the arrays of each call.
        num_examples: the number of rows of the whole batch; 0 if the arrays have no rows.
        is_module: whether they are the output of a module, or its gradient.
    """
    if len(calls) == 1:
        return [*calls[0]]
    found = [_of_examples(column, num_examples) for column in zip(*calls, strict=True)]
    if not all(found):
        return [array for call in calls for array in call]
    if is_module:
        return [array for own in found for array in own]
    return [np.stack(own, 1) if len(own) > 1 else own[0] for own in found]


def _of_examples(arrays: Sequence[np.ndarray], num_examples: int) -> list[np.ndarray]:
    """Returns the arrays of calls with all examples; empty if they have no rows of examples."""
    size = sum(len(array) if array.ndim else 0 for array in arrays)
    times = size // num_examples if num_examples and size % num_examples == 0 else 0
    if times == 1 or (times > 1 and arrays[0].ndim > 1 and len(arrays) % times == 0):
        return [np.concatenate(arrays[start::times]) for start in range(times)]
    return [np.stack(arrays)] if len(arrays) == num_examples else []


def of_scans(names: Sequence[str], iterations: Mapping[str, int]) -> list[tuple[str, int]]:
    """Returns name and number of the iteration of each call of modules, in the order of the calls.

    Neighbours with equally many iterations are called in one scan.

    Args:
        names: modules in the order of their first calls.
        iterations: module → number of those that are modules of their own; absent for 1.
    """
    found, start = list[tuple[str, int]](), 0
    while start < len(names):
        times, end = iterations.get(names[start], 1), start + 1
        while times > 1 and end < len(names) and iterations.get(names[end]) == times:
            end += 1
        found += [(name, number) for number in range(times) for name in names[start:end]]
        start = end
    return found
