"""Arrays of JAX: their kinds, their devices and how these split them, and copies on the host."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec


def copied(tree: Any) -> Any:
    """Returns a pytree with copies of its arrays on their devices."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, tree)


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array or a number, and no function or text."""
    return hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float, complex))


def is_key(leaf: Any) -> bool:
    """Returns whether an array is a key, or has the form of an untyped one."""
    is_typed = plain(leaf) is not leaf
    return is_typed or (np.result_type(leaf) == np.uint32 and np.shape(leaf)[-1:] == (2,))


def is_split(leaf: Any) -> bool:
    """Returns whether `leaf` is an array on several devices."""
    return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1


def mesh_sharding(leaf: Any) -> NamedSharding | None:
    """Returns how `leaf` is split over a mesh of several devices; None for other arrays."""
    is_named = is_split(leaf) and isinstance(leaf.sharding, NamedSharding)
    return leaf.sharding if is_named else None


def axes_of(spec: PartitionSpec) -> list[list[str]]:
    """Returns the axes of a mesh that split each dimension."""
    split = [axes if isinstance(axes, tuple) else (axes,) for axes in spec]
    return [[str(axis) for axis in axes if axis is not None] for axes in split]


def placement_of(spec: PartitionSpec, ndim: int, is_data: bool = False) -> str:
    """Returns how an array is split, as the trace format says it; "" for a whole copy.

    Each replica has examples of its own, which are not put together.
    """
    dims = [*axes_of(spec), *[[]] * ndim][:ndim]
    dims[:1] = [[]] if is_data and ndim else dims[:1]
    words = [f"d{i}[{','.join(axes)}]" if axes else f"d{i}" for i, axes in enumerate(dims)]
    words += [f"sum({axis})" for axis in sorted(getattr(spec, "unreduced", ()))]
    return " ".join(words) if any("[" in w or "(" in w for w in words) else ""


def plain(leaf: Any) -> Any:
    """Returns the data of a typed key, other leaves as they are."""
    typed = jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if typed else leaf


def host(leaf: Any) -> np.ndarray:
    """Returns a copy in the host's memory, of a type that NumPy knows."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    array = np.array(leaf)
    return array.astype(np.float32) if array.dtype.kind == "V" else array  # bfloat16, float8.


def like(leaf: Any, value: np.ndarray) -> Any:
    """Returns an array with these values, of the type and on the devices of `leaf`."""
    if (data := plain(leaf)) is not leaf:
        return jax.random.wrap_key_data(like(data, value), impl=jax.random.key_impl(leaf))
    value = np.broadcast_to(value, np.shape(leaf)).astype(np.result_type(leaf))
    if not is_split(leaf):
        return jax.numpy.asarray(value) if isinstance(leaf, jax.Array) else value
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])
