"""What a step keeps of its intermediate values, in a second compiled version with callbacks."""

from functools import partial
from typing import Any

import jax
import numpy as np

from lockstep.recorders.jax.arrays import copied, host, placement_of, plain
from lockstep.recorders.jax.private import context, manual_axes
from lockstep.recorders.jax.replicas import Replicas
from lockstep.recorders.jax.trees import flatten

GRADIENTS = ("raw", "sums", "unclipped", "clipped")
KEPT = (*GRADIENTS, "loss", "random", "data", "y_pred")

_KEPT = context()  # What receives the arrays of the step that is traced.


class Kept:
    """Receives what `keep` and `module` return in a recorded step.

    Attributes:
        gradients: names of the weights whose gradients are kept.
        modules: names of the parts of the model, in the order of their calls.
        placements: "KIND/INDEX" → how an array is part of a whole one.
    """

    def __init__(self) -> None:
        self.gradients, self.modules = list[str](), list[str]()
        self.placements = dict[str, str]()
        self._received = dict[tuple[str, int], list[Any]]()

    @property
    def is_of_one_program(self) -> bool:
        """Whether one program has run for all devices in the last step."""
        return all(device < 0 for _, device in self._received)

    def run(self, step: Any, args: Any, kwargs: Any, replicas: Replicas) -> dict[str, Any]:
        """Returns kind → for each array, that of each replica here, of a step on copies.

        Raises:
            ValueError: a kind is kept twice in the step, or on other devices than its examples.
        """
        self._received.clear()
        args, kwargs = copied([args, kwargs])
        with _KEPT(self):
            jax.block_until_ready(step(*args, **kwargs))
        jax.effects_barrier()
        kept: dict[str, Any] = {}
        for (kind, device), calls in self._received.items():
            if len(calls) > 1:
                raise ValueError(f"keep({kind!r}): {len(calls)} calls in a step; keep all at once")
            if device >= replicas.number:
                parts = f"device {device} runs it, the batch is split over {replicas.number}"
                raise ValueError(f"keep({kind!r}): {parts}; use the mesh of the arguments")
            rows = [self._received.get((kind, r)) or calls for r, _ in replicas.local]
            columns = [*zip(*([*map(host, leaves)] for (leaves,) in rows), strict=True)]
            if device < 0 and kind.startswith(("y_", "module_")):  # Each replica's rows of it.
                own = [replicas.rows[r] for r, _ in replicas.local]
                columns = [[x[part] for x, part in zip(c, own, strict=True)] for c in columns]
            kept[kind] = columns
        return kept

    def receive(self, kind: str, names: list[str], device: Any, *leaves: Any) -> None:
        """Takes the arrays of a kind from a device, or from the program of all devices (-1)."""
        # Converted after the step: waiting for a large array here can block a CPU device forever.
        self._received.setdefault((kind, int(device)), []).append(leaves)
        if kind in GRADIENTS:
            self.gradients = [name or "params" for name in names]


def keep(kind: str, tree: Any, specs: Any = None) -> Any:
    """Returns the pytree `tree`; in recorded steps, records its arrays on each device.

    In `shard_map`, `specs` says how they are split: a `PartitionSpec`, or a tree of them.
    """
    if kind not in KEPT:
        raise ValueError(f"keep: unknown kind {kind!r}; use one of {', '.join(KEPT)}")
    if (kept := _KEPT.value) is not None:
        _report(kept, kind, tree, specs)
        if kind == "y_pred":
            tree = _with_gradient(kept, "y_grad", tree, specs)
    return tree


def module(name: str, output: Any, specs: Any = None) -> Any:
    """Returns `output`, an array; in recorded steps, records it as the output of a part of a model.

    Also records the gradient of the loss by it. Parts are compared in the order of the calls, and a
    fault is in the first one that is wrong. `specs` is that of `keep`.
    """
    if (kept := _KEPT.value) is not None:
        kept.modules += [] if name in kept.modules else [name]
        number = kept.modules.index(name)
        _report(kept, f"module_out/{number}", output, specs)
        output = _with_gradient(kept, f"module_out_grad/{number}", output, specs)
    return output


def _report(kept: Kept, kind: str, tree: Any, specs: Any) -> None:
    """Passes the arrays of a kind to the recorder when the compiled step computes them."""
    axes = manual_axes()
    device = jax.lax.axis_index(axes) if axes else -1  # -1: one program for all devices.
    names, leaves, _ = flatten(tree)
    if axes and specs is not None:
        whole = jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), specs, tree)
        for index, spec in enumerate(jax.tree.leaves(whole)):
            key = kind if "/" in kind else f"{kind}/{index}"
            kept.placements[key] = placement_of(spec, np.ndim(leaves[index]))
    jax.debug.callback(partial(kept.receive, kind, names), device, *map(plain, leaves))


def _with_gradient(kept: Kept, kind: str, tree: Any, specs: Any) -> Any:
    """Returns `tree`; when the loss is differentiated, records its gradient as `kind`."""

    @jax.custom_vjp
    def same(outputs: Any) -> Any:
        return outputs

    def backward(_: None, gradient: Any) -> tuple[Any]:
        _report(kept, kind, gradient, specs)
        return (gradient,)

    same.defvjp(lambda outputs: (outputs, None), backward)
    return same(tree)
