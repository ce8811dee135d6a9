"""The names of JAX that are not public, or that some versions lack, and what they are needed for.

Each is used here only. One that is missing is an error with the version in one line: what it does
would not be seen.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from lockstep.recorders import common


def private(owner: Any, name: str) -> Any:
    """Returns an attribute that a version may lack; raises RuntimeError if there is none."""
    return common.private(f"record_jax: JAX {jax.__version__}", owner, name)


class _Context:
    """Holds a value while a function is traced, for JAX before 0.7.2."""

    value: Any = None

    @contextlib.contextmanager
    def __call__(self, value: Any) -> Iterator[None]:
        jax.clear_caches()  # A function that is compiled is traced again.
        self.value = value
        try:
            yield
        finally:
            self.value = None
            jax.clear_caches()


HAS_CONTEXTS = hasattr(jax, "make_user_context")


def context() -> Any:
    """Returns what holds a value while a function is traced: `jax.jit` compiles it for each."""
    return jax.make_user_context(None) if HAS_CONTEXTS else _Context()


def manual_axes() -> tuple[str, ...]:
    """Returns the axes of the devices of which each runs the function that is traced."""
    axes = tuple(private(jax.sharding.get_abstract_mesh(), "manual_axes"))
    if axes or common.numbers_of(jax.__version__) >= (0, 8):
        return axes
    core = private(private(jax, "_src"), "core")  # There, the axis of pmap is no mesh.
    return tuple(private(core, "get_axis_env")().axis_names())


def sharding_of_pmap(shape: tuple[int, ...], devices: Any) -> Any:
    """Returns how `jax.pmap` before JAX 0.7 places an array with a first axis of devices."""
    return private(jax.sharding, "PmapSharding").default(shape, 0, devices)
