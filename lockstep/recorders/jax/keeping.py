"""What a step keeps of its intermediate values, in a second compiled version with callbacks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from lockstep.recorders.jax.arrays import copied, host, placement_of, plain
from lockstep.recorders.jax.devices import Replicas
from lockstep.recorders.jax.paths import flatten
from lockstep.recorders.jax.scans import (
    Calls,
    in_groups,
    in_order,
    joined,
    mark_of,
    of_scans,
    place_of,
)

GRADIENTS = ("raw", "sums", "unclipped", "clipped")
KEPT = (*GRADIENTS, "loss", "random", "data", "y_pred")
_OUTPUTS = {"y_pred": "y_grad", "module_out": "module_out_grad"}  # → Kind of the gradient.

# What receives the arrays of the step that is traced; `jax.jit` compiles it for each value.
_KEPT = jax.make_user_context(None)


class Kept:
    """Receives what `keep` and `module` return in a recorded step.

    Attributes:
        paths: kind → the paths of the arrays in the tree that is kept.
        texts: kind → how each is part of a whole one, where the step says so.
        modules: names of the parts of the model, in the order of their calls.
        placements: "KIND/INDEX" → the same, for what is no gradient.
    """

    def __init__(self) -> None:
        self.paths, self.modules = dict[str, list[str]](), list[str]()
        self.placements = dict[str, str]()
        self._traced, self.texts = list[str](), dict[str, list[str]]()
        self._received = dict[tuple[str, int], list[Any]]()

    @property
    def is_of_one_program(self) -> bool:
        """Whether one program has run for all devices in the last step."""
        return all(device < 0 for _, device in self._received)

    def number_of(self, module: str) -> int:
        """Returns the position of a module among those of the function that is traced."""
        self._traced += [] if module in self._traced else [module]
        return self._traced.index(module)

    def run(
        self, step: Any, args: Any, kwargs: Any, replicas: Replicas, sizes: Sequence[int]
    ) -> dict[str, Any]:
        """Returns kind → for each array, that of each replica here, of a step on copies.

        `sizes` has the number of examples of each replica here.

        Raises:
            ValueError: a kind is kept twice in the step, or on other devices than its examples.
        """
        self._received.clear()
        args, kwargs = copied([args, kwargs])
        with _KEPT(self):
            jax.block_until_ready(step(*args, **kwargs))
        jax.effects_barrier()
        for kind, device in self._received:
            if device >= replicas.number:
                parts = f"device {device} runs it, the batch is split over {replicas.number}"
                raise ValueError(f"keep({kind!r}): {parts}; use the mesh of the arguments")
        whole = max((rows.stop or 0 for rows in replicas.rows), default=0) or max(sizes)
        of_devices = {device: whole for _, device in self._received if device < 0}
        of_devices |= {r: size for (r, _), size in zip(replicas.local, sizes, strict=True)}
        arrays = {device: self._of_device(device, size) for device, size in of_devices.items()}
        kept: dict[str, Any] = {}
        for kind, device in self._received:
            rows = [arrays[r].get(kind, arrays[device].get(kind, [])) for r, _ in replicas.local]
            if len({*map(len, rows)}) != 1:
                raise ValueError(
                    f"keep({kind!r}): the devices call it in other numbers of iterations"
                )
            columns = [*zip(*rows, strict=True)]
            if device < 0 and kind.startswith(("y_", "module_")):  # Each replica's rows of it.
                own = [replicas.rows[r] for r, _ in replicas.local]
                columns = [[x[part] for x, part in zip(c, own, strict=True)] for c in columns]
            kept |= {kind: columns} if columns else {}
        return self._of_modules(kept)

    def _of_device(self, device: int, num_examples: int) -> dict[str, list[np.ndarray]]:
        """Returns kind → the arrays of a device, or of the program of all devices."""
        received: dict[str, Calls] = {
            kind: in_groups([(int(place), [*map(host, leaves)]) for place, *leaves in calls])
            for (kind, own), calls in self._received.items()
            if own == device
        }
        for kind in [kind for kind in received if kind.split("/")[0] in _OUTPUTS]:
            of = _gradient_of(kind)
            received[kind], gradients = in_order(received[kind], received.pop(of, []))
            if len(gradients) == len(received[kind]):
                received[of] = gradients
        found = {}
        for kind, calls in received.items():
            if len(calls) > 1 and kind in (*GRADIENTS, "loss"):
                raise ValueError(
                    f"keep({kind!r}): {len(calls)} calls in a step; keep what the step adds up, or"
                    " all arrays in one call"
                )
            size = 0 if kind == "random" else num_examples
            found[kind] = joined(calls, size, is_module=kind.startswith("module_"))
        return found

    def _of_modules(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Returns what is kept, each iteration of a scan over layers as a module of its own."""
        outputs = {name: f"module_out/{i}" for i, name in enumerate(self._traced)}
        times = {name: len(kept[kind]) for name, kind in outputs.items() if kind in kept}
        calls = of_scans(self._traced, times)
        self.modules = [f"{name}[{i}]" if times.get(name, 1) > 1 else name for name, i in calls]
        kinds, texts = ("module_out", "module_out_grad"), self.texts
        found = {kind: x for kind, x in kept.items() if not kind.startswith(kinds)}
        for kind in {*found} - {*GRADIENTS}:
            self.placements |= {f"{kind}/{i}": text for i, text in enumerate(texts[kind])}
        for new, (name, number) in enumerate(calls):
            for kind in kinds:
                old = f"{kind}/{self._traced.index(name)}"
                if number < len(kept.get(old, ())):
                    found[f"{kind}/{new}"] = [kept[old][number]]
                    self.placements |= {f"{kind}/{new}": text for text in texts[old]}
        return found

    def receive(
        self, kind: str, paths: list[str], texts: list[str], device: Any, *leaves: Any
    ) -> None:  # fmt: skip
        """Takes the arrays of a kind from a device, or from the program of all devices (-1).

        The first one is the place of the others in `jax.vmap`. `texts` says how they are parts of
        whole ones, if the step does.
        """
        # Converted after the step: waiting for a large array here can block a CPU device forever.
        self._received.setdefault((kind, int(device)), []).append(leaves)
        self.paths[kind], self.texts[kind] = paths, texts


def _gradient_of(kind: str) -> str:
    """Returns the kind of the gradient of outputs."""
    name, *number = kind.split("/")
    return "/".join([_OUTPUTS[name], *number])


def keep(kind: str, tree: Any, specs: Any = None) -> Any:
    """Returns the pytree `tree`; in recorded steps, records its arrays on each device.

    In `shard_map`, `specs` says how they are split: a `PartitionSpec`, or a tree of them.
    """
    if kind not in KEPT:
        raise ValueError(f"keep: unknown kind {kind!r}; use one of {', '.join(KEPT)}")
    if (kept := _KEPT.value) is not None:
        if kind == "y_pred":
            return _with_gradient(kept, kind, tree, specs)
        _report(kept, kind, tree, specs)
    return tree


def module(name: str, output: Any, specs: Any = None) -> Any:
    """Returns `output`, an array; in recorded steps, records it as the output of a part of a model.

    Also records the gradient of the loss by it. Parts are compared in the order of the calls, and a
    fault is in the first one that is wrong. `specs` is that of `keep`.
    """
    if (kept := _KEPT.value) is not None:
        return _with_gradient(kept, f"module_out/{kept.number_of(name)}", output, specs)
    return output


def _report(kept: Kept, kind: str, tree: Any, specs: Any, *mark: Any) -> None:
    """Passes the arrays of a kind to the recorder when the compiled step computes them."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    device = jax.lax.axis_index(axes) if axes else -1  # -1: one program for all devices.
    (paths, leaves, _), texts = flatten(tree), list[str]()
    if axes and specs is not None:
        whole = jax.tree.leaves(jax.tree.broadcast(specs, tree))
        texts = [placement_of(*pair) for pair in zip(whole, map(np.ndim, leaves), strict=True)]
    leaves = [*map(plain, leaves), *mark]
    place = place_of(jax.lax.stop_gradient(leaves[0]))
    receive = partial(kept.receive, kind, paths, texts)
    jax.debug.callback(receive, device, place, *leaves)


def _with_gradient(kept: Kept, kind: str, tree: Any, specs: Any) -> Any:
    """Records outputs and returns them; when the loss is differentiated, records its gradient."""
    mark = mark_of(tree)
    _report(kept, kind, tree, specs, mark)

    @jax.custom_vjp
    def same(outputs: Any, mark: Any) -> Any:
        return outputs

    def backward(mark: Any, gradient: Any) -> tuple[Any, Any]:
        _report(kept, _gradient_of(kind), gradient, specs, mark)
        return gradient, 0 * mark

    same.defvjp(lambda outputs, mark: (outputs, mark), backward)
    return same(tree, mark)
