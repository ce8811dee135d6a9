"""Records steps of a JAX training, with each replica's results, in a file of plain arrays.

This file is standalone: copy it next to your script, or `from lockstep import record_jax`. It needs
JAX and NumPy.

    recorder = record_jax.record(
        "two.npz", train_step,  # train_step(params, opt_state, images, labels, key)
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3), "key": 4},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        optimizer={"class": "SGD", "learning_rate": 0.1, "momentum": 0.9})
    with recorder as train_step:
        ...  # The training loop, unchanged.

`arguments` and `outputs` say where arrays are in the arguments and in the result of `train_step`:
position, name of a keyword argument, path such as "0/params", or a tuple of these. "state" stands
for BatchNorm statistics. Other arrays that the step takes and returns under the same path, such as
averages of weights and step counters, are recorded as well, except keys. Within the step, `keep`
records gradients and returns them:

    grads = record_jax.keep("raw", grads)      # In shard_map or pmap: before psum or pmean.
    grads = record_jax.keep("sums", grads)     # After psum or pmean.
    grads = record_jax.keep("unclipped", grads)  # Before clipping, if that is not "sums".
    grads = record_jax.keep("clipped", grads)  # After clipping, if the step clips.
    key = record_jax.keep("random", key)       # The key that this device draws numbers with.
    logits = record_jax.keep("y_pred", logits) # In the loss function: also keeps its gradient.
    x = record_jax.module("block1.mlp", x)     # An output of a part of the model: the same.

Keep "raw" and "sums" after gradients are divided by the number of examples, or by the sum of their
weights, as on one device. Gradients that are divided later are compared as "clipped", unless
clipping hides the factor. A step that clips must keep "clipped"; "clipped" alone is enough, but
then a factor that clipping hides is not seen: also keep "sums" or "unclipped". A chain of Optax
that clips can keep both:

    kept = [optax.stateless(lambda g, _, kind=k: record_jax.keep(kind, g))
            for k in ("unclipped", "clipped")]
    tx = optax.chain(kept[0], optax.clip_by_global_norm(1.0), kept[1], optax.sgd(0.1))

Under `jax.jit` with shardings the step is one program for all devices, and the gradient of a single
device does not exist: keep "sums" and "clipped" only. Keys and losses are those of the whole batch.

If weights are split over an axis of the mesh, or an axis does not split the batch, the file has the
part of each device. In `shard_map`, what is kept is split as its weight is if its shape says so;
`keep(kind, tree, specs)` takes `PartitionSpec`s as `out_specs` does for anything else, such as
`P("data", "model")` for logits, or `P(unreduced={"model"})` for terms of a sum.

All steps run the compiled function unchanged. Before a recorded step, a second compiled version
with callbacks runs on copies of the arguments: recording does not change the training, and takes
about twice the time and memory in these steps. `train_step` must be a pure function. With several
processes, each writes a file: "two.rank0.npz", "two.rank1.npz".
"""

import contextlib
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 6):
    raise ImportError(f"record_jax needs JAX 0.6 or newer, and this is {jax.__version__}")

from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

KINDS = {"params": "weight", "state": "statistic", "opt_state": "optimizer state", "key": "seed"}
GRADIENTS = ("raw", "sums", "unclipped", "clipped")
KEPT = (*GRADIENTS, "loss", "random", "data", "y_pred")

DEFAULT_STEPS = (0, 1, 2)  # A shorter training has recorded all that was asked for.
_DATA_AXES = r"(dp|data|fsdp|ddp|replica|shard|batch)"  # Starts of names of axes of a mesh.


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


# The recorder of the step that is traced. `jax.jit` compiles a function once for each value.
_RECORDER = jax.make_user_context(None) if hasattr(jax, "make_user_context") else _Context()


def keep(kind: str, tree: Any, specs: Any = None) -> Any:
    """Returns the pytree `tree`; in recorded steps, records its arrays on each device.

    In `shard_map`, `specs` says how they are split: a `PartitionSpec`, or a tree of them.
    """
    if kind not in KEPT:
        raise ValueError(f"keep: unknown kind {kind!r}; use one of {', '.join(KEPT)}")
    if (recorder := _RECORDER.value) is not None:
        _report(recorder, kind, tree, specs)
        if kind == "y_pred":
            tree = _with_gradient(recorder, "y_grad", tree, specs)
    return tree


def module(name: str, output: Any, specs: Any = None) -> Any:
    """Returns `output`, an array; in recorded steps, records it as the output of a part of a model.

    Also records the gradient of the loss by it. Parts are compared in the order of the calls, and a
    fault is in the first one that is wrong. `specs` is that of `keep`.
    """
    if (recorder := _RECORDER.value) is not None:
        names = recorder._about.setdefault("modules", [])
        names += [] if name in names else [name]
        number = names.index(name)
        _report(recorder, f"module_out/{number}", output, specs)
        output = _with_gradient(recorder, f"module_out_grad/{number}", output, specs)
    return output


def _report(recorder: "record", kind: str, tree: Any, specs: Any) -> None:
    """Passes the arrays of a kind to the recorder when the compiled step computes them."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if not axes and isinstance(_RECORDER, _Context):  # The axis of pmap is no mesh yet.
        axes = tuple(jax._src.core.get_axis_env().axis_names())
    device = jax.lax.axis_index(axes) if axes else -1  # -1: one program for all devices.
    names, leaves, _ = _flatten(tree)
    if axes and specs is not None:
        whole = jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), specs, tree)
        for index, spec in enumerate(jax.tree.leaves(whole)):
            key = kind if "/" in kind else f"{kind}/{index}"
            recorder._placements[key] = _placement(spec, np.ndim(leaves[index]))
    jax.debug.callback(partial(recorder._receive, kind, names), device, *map(_plain, leaves))


def _with_gradient(recorder: "record", kind: str, tree: Any, specs: Any) -> Any:
    """Returns `tree`; when the loss is differentiated, records its gradient as `kind`."""

    @jax.custom_vjp
    def same(outputs: Any) -> Any:
        return outputs

    def backward(_: None, gradient: Any) -> tuple[Any]:
        _report(recorder, kind, gradient, specs)
        return (gradient,)

    same.defvjp(lambda outputs: (outputs, None), backward)
    return same(tree)


@dataclass(eq=False)
class record:
    """Wraps a training step and records some of its calls; a context manager."""

    # File to write at the end of the block; None: only runs of `assert_same_training` are recorded.
    path: str | os.PathLike[str] | None
    step: Callable[..., Any]  # From `jax.jit` or `jax.pmap`, or calling such functions.
    arguments: Mapping[str, Any]  # Of "params", "batch"; optionally "state", "opt_state", "key".
    outputs: Mapping[str, Any]  # Of the same without "batch", and of "loss".
    optimizer: Mapping[str, Any] = field(default_factory=dict)  # Values, or functions of the step.
    steps: Sequence[int] | int = DEFAULT_STEPS  # Numbers from 0; or how many first steps.
    # True if all arrays have a first axis of devices, as in `jax.pmap`; if `in_axes` is None for
    # some, the names of the `arguments` that have one, as in ("batch", "key").
    pmap: bool | Sequence[str] = False
    reduction: str = "mean"  # What the all-reduce computes of "raw": "mean" or "sum".
    layouts: Mapping[int, str] = field(default_factory=lambda: {2: "IO", 4: "HWIO"})
    data_layout: str = "NHWC"
    replay: str | os.PathLike[str] | None = None  # Trace to load the state from, before each step.
    permute: int | None = None  # Seed to permute the examples of each replica.
    names: Mapping[str, str] = field(default_factory=dict)  # For `replay`: own name to its name.

    def __post_init__(self) -> None:
        # `lockstep.assert_same_training` gives some arguments in place of those of the script.
        for name, value in json.loads(os.environ.get("LOCKSTEP_RECORD", "{}")).items():
            setattr(self, name, value)
        if type(self.step).__module__.startswith("flax.nnx"):
            raise ValueError(
                "the step of nnx.jit changes its arguments, and record_jax needs one that returns"
                " its state; use jax.jit for a step that gets nnx.state(model), calls nnx.merge,"
                " and returns nnx.state"
            )
        if self.path is None:
            self.steps, self.replay = (), None
        elif not Path(self.path).parent.is_dir():
            raise ValueError(f"{self.path}: must be in a folder that exists")
        self._wanted = set(range(self.steps) if isinstance(self.steps, int) else self.steps)
        self._asked = [] if self.steps is DEFAULT_STEPS else sorted(self._wanted)
        self._number, self._arrays, self._received = 0, dict[str, Any](), dict[Any, list[Any]]()
        self._about: dict[str, Any] = {"steps": [], "settings": [], "gradients": []}
        self._shardings, self._placements = dict[str, Any](), dict[str, str]()  # Of "KIND/INDEX".
        states = {"params", "state", "opt_state"} & {*self.arguments}
        for role in sorted({"params", "batch"} - {*self.arguments} | states - {*self.outputs}):
            raise ValueError(f"{role} is missing; add it to arguments, and to outputs if returned")
        self._carried: dict[str, str] | None = None  # Path of an argument → that of the result.
        self._trace = _Trace(Path(self.replay), self._wanted, self.names) if self.replay else None

    def __enter__(self) -> "record":
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._wanted = set()
        if self.path is None:
            return
        if self._arrays:
            self._about |= {"asked": self._asked, "ended_with": _in_words(error)}
            self._save(Path(self.path))
        elif error is None:
            warnings.warn(f"{self.path}: none of {self._number} steps was recorded", stacklevel=2)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step, and records it if its number is among `steps`."""
        number, self._number = self._number, self._number + 1
        if number not in self._wanted:
            return self.step(*args, **kwargs)
        names, leaves, tree = _flatten((args, kwargs), skip=1)
        arrays = {i: _plain(leaf) for i, leaf in enumerate(leaves) if _is_array(leaf)}
        inputs = {r: _find(names, where, r, arrays) for r, where in self.arguments.items()}
        inputs = self._with_carried(names, leaves, inputs, args, kwargs)
        placed = _place(self.step, args, kwargs)
        replicas = _Replicas(placed, inputs, self.pmap, self._shardings)
        variables = self._describe(leaves, inputs)
        found = dict[str, Any]()
        if self._trace:
            found["replaced"] = replicas.columns("replaced", placed, inputs, KINDS)
            self._trace.load(number, leaves, variables, keys=not replicas.split_keys)
        if self.permute is not None:
            for index, _ in inputs["batch"]:
                leaves[index] = replicas.permuted(leaves[index], (self.permute, number))
        args, kwargs = jax.tree.unflatten(tree, leaves)
        placed = _place(self.step, args, kwargs)
        if "computed_in" not in self._about:
            self._about["computed_in"] = _computed_in(self.step, args, kwargs)
        found["data"] = replicas.columns("data", placed, inputs, ["batch"])
        found["before"] = replicas.columns("before", placed, inputs, KINDS)
        found["random"] = replicas.columns("random", placed, inputs, ["key"])
        kept = self._run_with_callbacks(args, kwargs, replicas)
        result = self.step(*args, **kwargs)
        names, leaves, _ = _flatten(result)
        arrays = {i: leaf for i, leaf in enumerate(leaves) if _is_array(leaf)}
        outputs = {r: _find(names, where, r, arrays) for r, where in self.outputs.items()}
        if self._carried:
            places = {name: index for index, name in enumerate(names)}
            carried = [(places[name], name) for name in self._carried.values()]
            outputs["state"] = [*outputs.get("state", []), *carried]
        found["loss"] = replicas.columns("loss", leaves, outputs, ["loss"])
        # Keys that are not returned are left out: the script makes those of the next step.
        found["after"] = replicas.columns("after", leaves, outputs, KINDS, found["before"])
        self._store(number, found | kept, replicas)
        return result

    def _with_carried(
        self, names: list[str], leaves: list[Any], inputs: dict[str, Any], args: Any, kwargs: Any
    ) -> dict[str, Any]:
        """Returns the inputs with what the step takes and returns under no name of `arguments`."""
        if self._carried is None:
            copies = _copied([args, kwargs])  # A step may donate its arguments.
            result_names, result, _ = _flatten(self.step(*copies[0], **copies[1]))
            shapes = {i: leaf for i, leaf in enumerate(result) if hasattr(leaf, "dtype")}
            outputs = [_find(result_names, w, r, shapes) for r, w in self.outputs.items()]
            left = [(names, leaves, inputs.values()), (result_names, result, outputs)]
            self._carried = _carried(*[_left(*each) for each in left])
        places = {name: index for index, name in enumerate(names)}
        found = [(places[own], _tail(own) or own) for own in self._carried]
        known = {name for _, name in inputs.get("state", [])}
        found = [(i, names[i] if name in known else name) for i, name in found]
        return inputs | ({"state": [*inputs.get("state", []), *found]} if found else {})

    def _run_with_callbacks(self, args: Any, kwargs: Any, replicas: "_Replicas") -> dict[str, Any]:
        """Returns what `keep` records in the second version of the step."""
        self._received.clear()
        copied = _copied([args, kwargs])
        with _RECORDER(self):
            jax.block_until_ready(self.step(*copied[0], **copied[1]))
        jax.effects_barrier()
        kept: dict[str, Any] = {}
        for (kind, device), calls in self._received.items():
            if len(calls) > 1:
                raise ValueError(f"keep({kind!r}): {len(calls)} calls in a step; keep all at once")
            if device >= replicas.number:
                parts = f"device {device} runs it, the batch is split over {replicas.number}"
                raise ValueError(f"keep({kind!r}): {parts}; use the mesh of the arguments")
            rows = [self._received.get((kind, r)) or calls for r, _ in replicas.local]
            columns = [*zip(*([*map(_host, leaves)] for (leaves,) in rows), strict=True)]
            if device < 0 and kind.startswith(("y_", "module_")):  # Each replica's rows of it.
                own = [replicas.rows[r] for r, _ in replicas.local]
                columns = [[x[part] for x, part in zip(c, own, strict=True)] for c in columns]
            kept[kind] = columns
        return kept

    def _receive(self, kind: str, names: list[str], device: Any, *leaves: Any) -> None:
        # Converted after the step: waiting for a large array here can block a CPU device forever.
        self._received.setdefault((kind, int(device)), []).append(leaves)
        if kind in GRADIENTS:
            self._about["gradients"] = [name or "params" for name in names]

    def _describe(self, leaves: list[Any], inputs: Mapping[str, Any]) -> list[Any]:
        """Returns index, shape on a replica and description of each variable."""
        variables, shapes = list[Any](), dict[str, tuple[int, ...]]()
        for role, index, name in [(r, *pair) for r in KINDS for pair in inputs.get(r, [])]:
            shape = np.shape(_plain(leaves[index]))[_has_axis(self.pmap, role) :]
            shapes |= {name: shape} if role == "params" else {}
            fitting = [w for w in shapes if f"/{name}".endswith(f"/{w}") and shapes[w] == shape]
            weight = max(fitting, key=len, default="") if role in ("params", "opt_state") else ""
            entry = {"name": name if role in ("params", name) else f"{role}/{name}"}
            entry |= {"kind": KINDS[role]}
            entry |= {"layout": self.layouts.get(len(shape), "") if weight else ""}
            if role == "state" and np.result_type(_plain(leaves[index])).kind in "iub":
                # A counter, as of steps.
                entry |= {"kind": KINDS["opt_state"], "of": "", "slot": name.split("/")[-1]}
            if role == "opt_state":
                slot = name.removesuffix(weight).strip("/").split("/")[-1]
                entry |= {"of": weight, "slot": slot or "momentum"}
            variables.append((index, shape, entry))
        self._about["variables"] = [entry for _, _, entry in variables]
        return variables

    def _store(self, number: int, found: dict[str, Any], replicas: "_Replicas") -> None:
        """Keeps the arrays of a step until the end of the block."""
        about, settings = self._about, {k: v for k, v in self.optimizer.items() if k != "class"}
        settings = {k: float(v(number)) if callable(v) else v for k, v in settings.items()}
        settings["weights"] = [v["name"] for v in about["variables"] if v["kind"] == "weight"]
        about["steps"].append(number)
        about["settings"].append([settings])
        about["reduction"] = self.reduction if "raw" in found else ""
        if "sums" in found:
            found.setdefault("clipped", found["sums"])
        about |= {"num_replicas": replicas.number, "replicas": [r for r, _ in replicas.local]}
        if replicas.mesh:
            self._describe_mesh(replicas, found)
        one_key = not replicas.split_keys and all(device < 0 for _, device in self._received)
        for key, columns in found.items():
            kind, _, number_of_module = key.partition("/")
            for index, column in enumerate(columns, int(number_of_module or 0)):
                for (replica, _), array in zip(replicas.local, column, strict=True):
                    if kind == "random" and one_key and replica > 0:
                        continue  # One program draws the numbers of all devices.
                    array = array.view(np.uint8) if kind == "random" else array
                    array = array.squeeze() if kind == "loss" else array
                    self._arrays[f"{len(about['steps'])}/{kind}/{replica}/{index}"] = array

    def _describe_mesh(self, replicas: "_Replicas", found: Mapping[str, Any]) -> None:
        """Describes the mesh, and how the arrays of each device are part of the whole ones."""
        about, placements, sizes = self._about, self._placements, dict(replicas.mesh.shape)
        for key, sharding in self._shardings.items():
            kind, place = key.split("/")
            if sharding:
                ndim = found[kind][int(place)][0].ndim
                placements[key] = _placement(sharding.spec, ndim, kind == "data")
        weights = [v["name"] for v in about["variables"] if v["kind"] == "weight"]
        for kind in [kind for kind in GRADIENTS if kind in found]:
            is_sum = found[kind] is found.get("sums")
            for index, name in enumerate(about["gradients"]):
                own = weights.index(name) if name in weights else -1
                if own >= 0 and found[kind][index][0].shape == found["before"][own][0].shape:
                    text = placements.get(f"before/{own}", "")
                    text = placements.get(f"sums/{index}", text) if is_sum else text
                    placements.setdefault(f"{kind}/{index}", text)
        raw = " ".join(text for key, text in placements.items() if key.startswith("raw/"))
        split = {*",".join(re.findall(r"\[(.*?)\]", raw)).split(",")} & {*replicas.batch_axes}
        if wrong := [axis for axis in split if re.match(_DATA_AXES, axis)]:
            axis = f"split over {wrong[0]!r}, an axis of the batch"
            raise ValueError(f'keep("raw"): gradients {axis}, are sums; keep them as "sums" only')
        data_axes = [axis for axis in replicas.batch_axes if axis not in split]
        about |= {"mesh": sizes, "ranks": about.pop("replicas"), "data_axes": data_axes}
        about["num_replicas"] = math.prod(sizes[axis] for axis in data_axes)
        about["placements"] = {key: text for key, text in placements.items() if text}

    def _save(self, path: Path) -> None:
        """Writes the file under another name first, then renames it."""
        optimizer = {k: v for k, v in self.optimizer.items() if not callable(v)}
        about = {"format": "lockstep trace", "version": 2, "framework": "jax", **self._about}
        about |= {"versions": {"jax": jax.__version__}, "order": "reduce, clip", "layers": []}
        about |= {"optimizer": optimizer | {"framework": "jax"}, "data_layout": self.data_layout}
        about |= {"permuted": self.permute, "replayed": self._trace and self._trace.path.name}
        about |= {"not_loaded": [*self._trace.not_loaded] if self._trace else []}
        if jax.process_count() > 1:
            path = path.with_suffix(f".rank{jax.process_index()}.npz")
        temporary = path.with_name(f"{path.name}.tmp")
        with open(temporary, "wb") as file:
            np.savez(file, about=np.array(json.dumps(about)), **self._arrays)
            file.flush()
            os.fsync(file.fileno())  # A power cut leaves the whole file, or none.
        os.replace(temporary, path)


def _in_words(error: BaseException | None) -> str:
    """Returns the exception that ended the training in one line; "" for none and `sys.exit(0)`."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return "".join(c for c in text if c.isprintable())[:200].removesuffix(": ").removesuffix(":")


class _Replicas:
    """The devices of a step that have different examples; all devices if they have the same.

    With a mesh, of which other axes split weights or nothing, all its devices.
    """

    def __init__(
        self, placed: Sequence[Any], inputs: Mapping[str, Any], pmap: Any, shardings: dict[str, Any]
    ) -> None:
        batch = next(placed[i] for i, _ in inputs["batch"] if np.ndim(placed[i]))
        places = {jax.local_devices()[0]: (slice(None),)}
        if _split(batch):
            places = batch.sharding.devices_indices_map(batch.shape)
        distinct = {str(index[0]): device for device, index in reversed(places.items())}
        devices = [*distinct.values()][::-1] if len(distinct) > 1 else [*places]
        self.batch_axes = [*(_axes(own.spec) if (own := _named(batch)) else ()), []][0]
        states = [i for role in ("params", "opt_state") for i, _ in inputs.get(role, [])]
        self.mesh: Any = None if pmap else self._mesh_of(batch, [placed[i] for i in states])
        self.shardings = shardings  # KIND/INDEX → that of the first recorded step, or None.
        devices = [*self.mesh.devices.flat] if self.mesh else devices
        whole = (slice(None),)
        self.number, self.rows = len(devices), [places.get(d, whole)[0] for d in devices]
        self.pmap = pmap
        own = jax.process_index()
        self.local = [(r, d) for r, d in enumerate(devices) if d.process_index == own]
        keys = [placed[index] for index, _ in inputs.get("key", [])]
        self.split_keys = _has_axis(pmap, "key") == 1
        self.split_keys |= any(_split(k) and not k.is_fully_replicated for k in keys)

    def _mesh_of(self, batch: Any, states: Sequence[Any]) -> Any:
        """Returns a mesh that splits weights, or has more axes than split the batch, or None."""
        named = [sharding for sharding in map(_named, [batch, *states]) if sharding]
        sizes = named[0].mesh.shape if named else {}
        others = {axis for axis, size in sizes.items() if size > 1 and axis not in self.batch_axes}
        is_split = any(_split(state) and not state.is_fully_replicated for state in states)
        return named[0].mesh if named and (is_split or (self.batch_axes and others)) else None

    def columns(
        self,
        kind: str,
        leaves: Sequence[Any],
        found: Any,
        roles: Iterable[str],
        inputs: Sequence[Any] = (),
    ) -> list[Any]:
        """Returns for each array of `roles` the host arrays of this process's replicas.

        An output has an axis of devices if it has one more than the same column of `inputs`. With a
        mesh, notes the sharding of the arrays.
        """
        pairs = [(_plain(leaves[i]), role) for role in roles for i, _ in found.get(role, [])]
        if self.mesh:
            return [self._parts(leaf, f"{kind}/{i}") for i, (leaf, _) in enumerate(pairs)]
        axes = [_has_axis(self.pmap, role) for _, role in pairs]
        if self.pmap and roles == ["loss"]:
            axes = [min(np.ndim(leaf), 1) for leaf, _ in pairs]
        elif self.pmap and inputs:
            axes = [np.ndim(p[0]) - c[0].ndim for p, c in zip(pairs, inputs, strict=False)]
        return [self._column(*pair, axis) for pair, axis in zip(pairs, axes, strict=True)]

    def _parts(self, leaf: Any, key: str) -> list[np.ndarray]:
        """Returns the part of each device, in each recorded step of the same sharding."""
        own = _named(leaf)
        sharding = self.shardings.setdefault(key, own if own and own.mesh == self.mesh else None)
        if sharding is None:
            return [_host(leaf)] * len(self.local)
        leaf = leaf if own == sharding else jax.device_put(leaf, sharding)
        shards = {shard.device: shard.data for shard in leaf.addressable_shards}
        return [_host(shards[device]) for _, device in self.local]

    def _column(self, leaf: Any, role: str, has_axis: int) -> list[np.ndarray]:
        if has_axis and np.shape(leaf)[:1] != (self.number,):
            raise ValueError(
                f"pmap: {role} of shape {np.shape(leaf)} has no axis of devices; if in_axes is"
                ' None for it, use pmap=("batch",), with the names that have one'
            )
        values = [leaf] * len(self.local)
        part = has_axis or role in ("batch", "key", "loss")  # Of the others, the whole array.
        if _split(leaf) and (part or leaf.is_fully_replicated):
            shards = {shard.device: shard.data for shard in leaf.addressable_shards}
            values = [shards[device] for _, device in self.local]
        return [_host(value)[0] if has_axis else _host(value) for value in values]

    def permuted(self, leaf: Any, seed: Sequence[int]) -> Any:
        """Returns `leaf` with its examples in another order, each on the same replica."""
        generator, values = np.random.default_rng(seed), _host(_plain(leaf))
        distinct = {str(rows): rows for rows in self.rows}
        for rows in distinct.values() if values.ndim else ():
            values[rows] = generator.permutation(values[rows], axis=_has_axis(self.pmap, "batch"))
        return _like(leaf, values)


class _Trace:
    """The trace of another training, of one process or several: the state of its replica 0."""

    def __init__(self, path: Path, wanted: set[int], names: Mapping[str, str]) -> None:
        self.path, self.names, self._fixed = path, names, {*names, *names.values()}
        self.not_loaded: dict[str, None] = {}  # Names of own variables, in their order.
        file = path if path.exists() else path.with_suffix(".rank0.npz")
        if not file.exists():
            raise ValueError(f"replay={path}: no such file; record it first")
        self.members = np.load(file)
        self.about = json.loads(str(self.members["about"]))
        if self.about["version"] != 2:
            raise ValueError(f"replay={path}: is not of version 2; record it again")
        if self.about.get("mesh"):
            raise ValueError(f"replay={path}: is of several devices; record one device")
        self.aliases = self.about.get("aliases", {})
        if missing := sorted(wanted - {*self.about["steps"]}):
            raise ValueError(f"replay={path}: no step {missing}; use steps={self.about['steps']}")

    def _array(self, name: str) -> np.ndarray:
        return self.members[self.aliases.get(name, name)]

    def load(self, number: int, leaves: list[Any], variables: list[Any], keys: bool) -> None:
        """Replaces the variables among `leaves` by those before step `number`."""
        kinds = [*KINDS.values()][: 2 if self.about["framework"] != "jax" else 3 + keys]
        prefix = f"{self.about['steps'].index(number) + 1}/before/0"
        left = dict(enumerate(self.about["variables"]))
        for index, shape, mine in variables:
            name = self.names.get(mine["name"], mine["name"])
            same = {
                i: _transpose(self._array(f"{prefix}/{i}"), theirs["layout"], mine["layout"])
                for i, theirs in left.items()
                if theirs["kind"] == mine["kind"] in kinds
                and (theirs["name"] == name or not {mine["name"], theirs["name"]} & self._fixed)
            }
            fits = [i for i, value in same.items() if value.shape == shape]
            if not shape:  # A counter is no learning rate.
                kind = np.result_type(_plain(leaves[index])).kind
                fits = [i for i in fits if same[i].dtype.kind == kind]
            # By name, else the first of the same state of the same weight, else the first.
            place = mine.get("of"), mine.get("slot")
            fits.sort(key=lambda i: (left[i].get("of"), left[i].get("slot")) != place)
            fits.sort(key=lambda i: left[i]["name"] != name)
            if fits:
                leaves[index] = _like(leaves[index], same[fits[0]])
                del left[fits[0]]
            elif mine["kind"] == "optimizer state":
                self.not_loaded[mine["name"]] = None  # The other optimizer has no such state.
            elif mine["kind"] in kinds[:2]:
                options = [(left[i]["name"], value.shape) for i, value in same.items()]
                raise ValueError(
                    f"replay={self.path}: no {mine['kind']} for {mine['name']} {shape} among "
                    f"{options}; pass names={{{mine['name']!r}: …}}"
                )


def _transpose(value: np.ndarray, theirs: str, mine: str) -> np.ndarray:
    """Returns `value`, of the layout `theirs`, in the layout `mine`."""
    same_axes = theirs and sorted(theirs) == sorted(mine)
    return value.transpose([theirs.index(axis) for axis in mine]) if same_axes else value


def _flatten(tree: Any, skip: int = 0) -> tuple[list[str], list[Any], Any]:
    """Returns the paths of the leaves, without the first `skip` keys, the leaves, the structure."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path[skip:], simple=True, separator="/") for path, _ in pairs]
    return names, [leaf for _, leaf in pairs], structure


def _find(
    names: list[str], where: Any, role: str, arrays: Mapping[int, Any]
) -> list[tuple[int, str]]:
    """Returns index and name of the arrays at `where`; the name is relative to a single place."""
    places = where if isinstance(where, tuple) else (where,)
    cut = 0 if len(places) > 1 else len(f"{where}/")
    found = [
        (index, name[cut:] or role)
        for place in places
        for index, name in enumerate(names)
        if index in arrays and f"{name}/".startswith(f"{place}/")
    ]
    if not found and role not in ("state", "opt_state"):  # They may be empty.
        raise ValueError(f"{role}: no array at {where!r} among {', '.join(names)}")
    return found


def _copied(tree: Any) -> Any:
    """Returns a pytree with copies of its arrays on their devices."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, tree)


def _is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array or a number, and no function or text."""
    return hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float, complex))


def _is_key(leaf: Any) -> bool:
    """Returns whether an array is a key, or has the form of an untyped one."""
    is_typed = _plain(leaf) is not leaf
    return is_typed or (np.result_type(leaf) == np.uint32 and np.shape(leaf)[-1:] == (2,))


def _tail(name: str) -> str:
    """Returns a path without its first key, which is the position of an argument."""
    return name.partition("/")[2]


def _left(
    names: Sequence[str], leaves: Sequence[Any], roles: Iterable[Sequence[tuple[int, str]]]
) -> dict[str, tuple[Any, ...]]:
    """Returns path → shape and kind of arrays, without keys, that have no role."""
    known = {index for pairs in roles for index, _ in pairs}
    arrays = {n: x for i, (n, x) in enumerate(zip(names, leaves, strict=True)) if i not in known}
    arrays = {n: x for n, x in arrays.items() if _is_array(x) and not _is_key(x)}
    return {n: (np.shape(x), np.result_type(x).kind) for n, x in arrays.items()}


def _carried(given: Mapping[str, Any], returned: Mapping[str, Any]) -> dict[str, str]:
    """Returns the paths of arrays that a step takes and returns: argument → result.

    A number that has no path within its argument is a step counter, or a setting or a metric.
    """
    found: dict[str, str] = {}
    for name, kind in given.items():
        free = [n for n, other in returned.items() if other == kind and n not in found.values()]
        fits = [n for n in free if _tail(n) == _tail(name)]
        fits.sort(key=lambda n: n != name)
        if fits and (_tail(name) or kind[1] in "iu"):
            found[name] = fits[0]
    return found


def _place(step: Any, args: Any, kwargs: Any) -> list[Any]:
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
        return [_on_devices(leaf, len(jax.local_devices())) for leaf in leaves]
    numbers = (bool, int, float, complex)  # Others without a dtype are static arguments.
    arrays = [i for i, a in enumerate(leaves) if hasattr(a, "dtype") or isinstance(a, numbers)]
    for index, sharding in zip(arrays, shardings, strict=True):
        if sharding and len(sharding.device_set) > 1 and not _split(leaves[index]):
            leaves[index] = jax.device_put(leaves[index], sharding)
    return leaves


def _on_devices(leaf: Any, most: int) -> Any:
    """Returns an array whose first axis may be that of devices, one row on each, as pmap does."""
    number = next(iter(np.shape(leaf)), 0)
    if not 1 < number <= most or _split(leaf):
        return leaf
    data, devices = _plain(leaf), jax.local_devices()[:number]
    return jax.device_put(data, jax.sharding.PmapSharding.default(data.shape, 0, devices))


def _computed_in(step: Any, args: Any, kwargs: Any) -> str:
    """Returns the 16-bit dtype of a compiled step's matrix products and convolutions, or ""."""
    text = step.lower(*args, **kwargs).as_text() if hasattr(step, "lower") else ""
    for short, dtype in (("bf16", "bfloat16"), ("f16", "float16")):
        if re.search(rf"(dot_general|convolution)[^\n]*[<x]{short}>", text):
            return dtype
    return ""


def _has_axis(pmap: bool | Sequence[str], role: str) -> int:
    """Returns 1 if the arrays of a name of `arguments` have a first axis of devices, else 0."""
    return int(pmap if isinstance(pmap, bool) else role in pmap)


def _split(leaf: Any) -> bool:
    """Returns whether `leaf` is an array on several devices."""
    return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1


def _named(leaf: Any) -> NamedSharding | None:
    """Returns how `leaf` is split over a mesh of several devices; None for other arrays."""
    is_named = _split(leaf) and isinstance(leaf.sharding, NamedSharding)
    return leaf.sharding if is_named else None


def _axes(spec: PartitionSpec) -> list[list[str]]:
    """Returns the axes of a mesh that split each dimension."""
    split = [axes if isinstance(axes, tuple) else (axes,) for axes in spec]
    return [[str(axis) for axis in axes if axis is not None] for axes in split]


def _placement(spec: PartitionSpec, ndim: int, is_data: bool = False) -> str:
    """Returns how an array is split, as the trace format says it; "" for a whole copy.

    Each replica has examples of its own, which are not put together.
    """
    dims = [*_axes(spec), *[[]] * ndim][:ndim]
    dims[:1] = [[]] if is_data and ndim else dims[:1]
    words = [f"d{i}[{','.join(axes)}]" if axes else f"d{i}" for i, axes in enumerate(dims)]
    words += [f"sum({axis})" for axis in sorted(getattr(spec, "unreduced", ()))]
    return " ".join(words) if any("[" in w or "(" in w for w in words) else ""


def _plain(leaf: Any) -> Any:
    """Returns the data of a typed key, other leaves as they are."""
    typed = jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if typed else leaf


def _host(leaf: Any) -> np.ndarray:
    """Returns a copy in the host's memory, of a type that NumPy knows."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    array = np.array(leaf)
    return array.astype(np.float32) if array.dtype.kind == "V" else array  # bfloat16, float8.


def _like(leaf: Any, value: np.ndarray) -> Any:
    """Returns an array with these values, of the type and on the devices of `leaf`."""
    if (data := _plain(leaf)) is not leaf:
        return jax.random.wrap_key_data(_like(data, value), impl=jax.random.key_impl(leaf))
    value = np.broadcast_to(value, np.shape(leaf)).astype(np.result_type(leaf))
    if not _split(leaf):
        return jax.numpy.asarray(value) if isinstance(leaf, jax.Array) else value
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])
