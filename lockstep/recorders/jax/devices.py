"""The devices of a step, and the arrays that each of them has.

The step is lowered, not run, to learn where it wants its arguments, and how its products round.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lockstep.recorders.jax.arrays import (
    axes_of,
    host,
    is_array,
    is_split,
    like,
    mesh_sharding,
    plain,
)


def has_axis(pmap: bool | Sequence[str], role: str) -> int:
    """Returns 1 if the arrays of a name of `arguments` have a first axis of devices, else 0."""
    return int(pmap if isinstance(pmap, bool) else role in pmap)


class Replicas:
    """The devices of a step that have different examples; all devices if they have the same.

    With a mesh, of which other axes split weights or nothing, all its devices.

    Args:
        placed, inputs: arrays of the step, and those of each role.
        pmap: whether they have an axis of devices.
        shardings: KIND/INDEX → that of the first recorded step, or None.
        has_mesh: whether there may be a mesh: not if the first recorded step has none, as where a
            state is split when a step has returned it; it is then recorded whole in all steps.
    """

    def __init__(
        self, placed: Sequence[Any], inputs: Mapping[str, Any], pmap: Any,
        shardings: dict[str, Any], *, has_mesh: bool = True,
    ) -> None:  # fmt: skip
        batch = next(placed[i] for i, _ in inputs["batch"] if np.ndim(placed[i]))
        places = {jax.local_devices()[0]: (slice(None),)}
        if is_split(batch):
            places = batch.sharding.devices_indices_map(batch.shape)
        distinct = {str(index[0]): device for device, index in reversed(places.items())}
        devices = [*distinct.values()][::-1] if len(distinct) > 1 else [*places]
        self.batch_axes = [*(axes_of(own.spec) if (own := mesh_sharding(batch)) else ()), []][0]
        states = [i for role in ("params", "opt_state") for i, _ in inputs.get(role, [])]
        self.mesh: Any = None
        if has_mesh and not pmap:
            self.mesh = self._mesh_of(batch, [placed[i] for i in states])
        self.shardings = shardings
        devices = [*self.mesh.devices.flat] if self.mesh else devices
        whole = (slice(None),)
        self.number, self.rows = len(devices), [places.get(d, whole)[0] for d in devices]
        self.pmap = pmap
        own = jax.process_index()
        self.local = [(r, d) for r, d in enumerate(devices) if d.process_index == own]
        keys = [placed[index] for index, _ in inputs.get("key", [])]
        self.split_keys = has_axis(pmap, "key") == 1
        self.split_keys |= any(is_split(k) and not k.is_fully_replicated for k in keys)

    def _mesh_of(self, batch: Any, states: Sequence[Any]) -> Any:
        """Returns a mesh that splits weights or examples, or has more axes than split the batch."""
        named = [sharding for sharding in map(mesh_sharding, [batch, *states]) if sharding]
        sizes = named[0].mesh.shape if named else {}
        others = {axis for axis, size in sizes.items() if size > 1 and axis not in self.batch_axes}
        are_parts = any(is_split(state) and not state.is_fully_replicated for state in states)
        sharding = mesh_sharding(batch)  # Examples may be split, too, as over words of a sequence.
        are_parts |= sharding is not None and any(axes_of(sharding.spec)[1:])
        return named[0].mesh if named and (are_parts or (self.batch_axes and others)) else None

    def columns(
        self, kind: str, leaves: Sequence[Any], found: Any, roles: Iterable[str],
        inputs: Sequence[Any] = (),
    ) -> list[Any]:  # fmt: skip
        """Returns for each array of `roles` the host arrays of this process's replicas.

        An output has an axis of devices if it has one more than the same column of `inputs`. With a
        mesh, notes the sharding of the arrays.
        """
        pairs = [(plain(leaves[i]), role) for role in roles for i, _ in found.get(role, [])]
        if self.mesh:
            return [self._parts(leaf, f"{kind}/{i}") for i, (leaf, _) in enumerate(pairs)]
        axes = [has_axis(self.pmap, role) for _, role in pairs]
        if self.pmap and roles == ["loss"]:
            axes = [min(np.ndim(leaf), 1) for leaf, _ in pairs]
        elif self.pmap and inputs:
            axes = [np.ndim(p[0]) - c[0].ndim for p, c in zip(pairs, inputs, strict=False)]
        return [self._column(*pair, axis) for pair, axis in zip(pairs, axes, strict=True)]

    def _parts(self, leaf: Any, key: str) -> list[np.ndarray]:
        """Returns the part of each device, in each recorded step of the same sharding."""
        own = mesh_sharding(leaf)
        sharding = self.shardings.setdefault(key, own if own and own.mesh == self.mesh else None)
        if sharding is None:
            return [host(leaf)] * len(self.local)
        leaf = leaf if own == sharding else jax.device_put(leaf, sharding)
        shards = {shard.device: shard.data for shard in leaf.addressable_shards}
        return [host(shards[device]) for _, device in self.local]

    def _column(self, leaf: Any, role: str, axis: int) -> list[np.ndarray]:
        if axis and np.shape(leaf)[:1] != (self.number,):
            raise ValueError(
                f"pmap: {role} of shape {np.shape(leaf)} has no axis of devices; if in_axes is"
                ' None for it, use pmap=("batch",), with the names that have one'
            )
        values = [leaf] * len(self.local)
        is_part = axis or role in ("batch", "key", "loss")  # Of the others, the whole array.
        if is_split(leaf) and (is_part or leaf.is_fully_replicated):
            shards = {shard.device: shard.data for shard in leaf.addressable_shards}
            values = [shards[device] for _, device in self.local]
        return [host(value)[0] if axis else host(value) for value in values]

    def permuted(self, leaf: Any, seed: Sequence[int]) -> Any:
        """Returns `leaf` with its examples in another order, each on the same replica."""
        generator, values = np.random.default_rng(seed), host(plain(leaf))
        distinct = {str(rows): rows for rows in self.rows}
        for rows in distinct.values() if values.ndim else ():
            values[rows] = generator.permutation(values[rows], axis=has_axis(self.pmap, "batch"))
        return like(leaf, values)


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
