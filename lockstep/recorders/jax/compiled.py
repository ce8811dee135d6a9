"""What a compiled step tells: where it wants its arguments, and in which dtype it computes."""

import re
from typing import Any

import jax
import numpy as np

from lockstep.recorders.jax.arrays import is_array, is_split, plain
from lockstep.recorders.jax.private import sharding_of_pmap


def placed_leaves(step: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns the leaves of the arguments, on the devices where the compiled step wants them."""
    leaves = jax.tree.leaves((args, kwargs))
    if not hasattr(step, "lower"):
        return leaves
    compiled = step.lower(*args, **kwargs).compile()
    if not hasattr(compiled, "in_tree"):
        return leaves  # Of `equinox.filter_jit`, whose arguments are arrays on their devices.
    try:
        shardings = compiled.in_tree.flatten_up_to(compiled.input_shardings)
    except AttributeError:  # Before JAX 0.7, of pmap.
        return [on_devices(leaf, len(jax.local_devices())) for leaf in leaves]
    arrays = [i for i, a in enumerate(leaves) if is_array(a)]  # Others are static arguments.
    for index, sharding in zip(arrays, shardings, strict=True):
        if sharding and len(sharding.device_set) > 1 and not is_split(leaves[index]):
            leaves[index] = jax.device_put(leaves[index], sharding)
    return leaves


def on_devices(leaf: Any, most: int) -> Any:
    """Returns an array whose first axis may be that of devices, one row on each, as pmap does."""
    number = next(iter(np.shape(leaf)), 0)
    if not 1 < number <= most or is_split(leaf):
        return leaf
    data, devices = plain(leaf), jax.local_devices()[:number]
    return jax.device_put(data, sharding_of_pmap(data.shape, devices))


def computed_in(step: Any, args: Any, kwargs: Any) -> str:
    """Returns the dtype to which a compiled step's products round, or ""; see `dtype_of`."""
    text = step.lower(*args, **kwargs).as_text() if hasattr(step, "lower") else ""
    return dtype_of(text, jax.default_backend())


def dtype_of(text: str, platform: str) -> str:
    """Returns the dtype to which matrix products and convolutions round; "" for float32.

    A GPU rounds float32 to TF32, and a TPU to bfloat16, unless a precision is asked for.

    Args:
        text: the lowered step, in StableHLO.
        platform: that of JAX, as "gpu".
    """
    products = [line for line in text.splitlines() if re.search("dot_general|convolution", line)]
    for short, dtype in (("bf16", "bfloat16"), ("f16", "float16")):
        if any(re.search(rf"[<x]{short}>", line) for line in products):
            return dtype
    if platform == "gpu" and any("HIGHEST" not in line for line in products):
        return "tensorfloat32"
    return "bfloat16" if platform == "tpu" and any("DEFAULT" in x for x in products) else ""
