"""What JAX tells of a step without running it: devices, and dtype of its products."""

import re
from collections.abc import Sequence
from typing import Any

import jax

from lockstep.recorders.jax.arrays import is_array, is_split


class Lowered:
    """A step that is lowered for some arguments; one that JAX does not compile tells nothing."""

    def __init__(self, step: Any, args: Any, kwargs: Any) -> None:
        self._lowered = step.lower(*args, **kwargs) if hasattr(step, "lower") else None
        self._shardings: list[Any] = []
        compiled: Any = self._lowered.compile() if self._lowered else None
        if hasattr(compiled, "in_tree"):  # Not of `equinox.filter_jit`.
            self._shardings = compiled.in_tree.flatten_up_to(compiled.input_shardings)

    def placed(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the leaves of the arguments, on the devices where the step wants them."""
        placed = [*leaves]
        arrays = [i for i, a in enumerate(leaves) if is_array(a)]  # Others are static arguments.
        for index, sharding in zip(arrays, self._shardings, strict=bool(self._shardings)):
            if sharding and len(sharding.device_set) > 1 and not is_split(leaves[index]):
                placed[index] = jax.device_put(leaves[index], sharding)
        return placed

    def computed_in(self) -> str:
        """Returns the dtype to which its products round, or ""; see `dtype_of`."""
        text = self._lowered.as_text() if self._lowered else ""
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
