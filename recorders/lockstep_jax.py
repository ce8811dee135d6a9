"""Records steps of a JAX training, with what each replica computed, in a file of plain arrays.

This file is standalone: copy it next to your script. It needs JAX and NumPy.

    recorder = lockstep_jax.record(
        "two.npz", train_step,  # train_step(params, opt_state, images, labels, key)
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3), "key": 4},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        optimizer={"class": "SGD", "learning_rate": 0.1, "momentum": 0.9})
    with recorder as train_step:
        ...  # The training loop, unchanged.

`arguments` and `outputs` say where arrays are in the arguments and in the result of `train_step`:
position, name of a keyword argument, path such as "0/params", or a tuple of these. "state" stands
for BatchNorm statistics. Within the step, gradients are recorded by `keep`, which returns them:

    grads = lockstep_jax.keep("raw", grads)      # In shard_map or pmap: before psum or pmean.
    grads = lockstep_jax.keep("sums", grads)     # After psum or pmean.
    grads = lockstep_jax.keep("clipped", grads)  # After clipping, if the step clips.
    key = lockstep_jax.keep("random", key)       # The key that this device draws numbers with.

Under `jax.jit` with shardings the step is one program for all devices, and the gradient of a single
device does not exist: keep "sums" and "clipped" only. Keys and losses are those of the whole batch.

All steps run the compiled function unchanged. Before a recorded step, a second compiled version
with callbacks runs on copies of the arguments: recording does not change the training, and takes
about twice the time and memory in these steps. `train_step` must be a pure function. With several
processes, each writes a file: "two.rank0.npz", "two.rank1.npz".
"""

import json
import os
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

KINDS = {"params": "weight", "state": "statistic", "opt_state": "optimizer state", "key": "seed"}
KEPT = ("raw", "sums", "clipped", "loss", "random", "data")

# The recorder of the step that is traced. `jax.jit` compiles a function once for each value.
_RECORDER = jax.make_user_context(None)


def keep(kind: str, tree: Any) -> Any:
    """Returns the pytree `tree`; in recorded steps, records its arrays on each device."""
    if kind not in KEPT:
        raise ValueError(f"keep: unknown kind {kind!r}; use one of {', '.join(KEPT)}")
    if (recorder := _RECORDER.value) is not None:
        axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        device = jax.lax.axis_index(axes) if axes else -1  # -1: one program for all devices.
        names, leaves, _ = _flatten(tree)
        jax.debug.callback(partial(recorder._receive, kind, names), device, *map(_plain, leaves))
    return tree


@dataclass(eq=False)
class record:
    """Wraps a training step and records some of its calls; a context manager."""

    path: str | os.PathLike[str]  # File to write at the end of the block.
    step: Callable[..., Any]  # From `jax.jit` or `jax.pmap`, or calling such functions.
    arguments: Mapping[str, Any]  # Of "params", "batch"; optionally "state", "opt_state", "key".
    outputs: Mapping[str, Any]  # Of the same without "batch", and of "loss".
    optimizer: Mapping[str, Any] = field(default_factory=dict)  # Values, or functions of the step.
    steps: Sequence[int] | int = (0, 1, 2, 234, 235)  # Numbers from 0; or how many first steps.
    pmap: bool = False  # True if all arrays have a first axis of devices, as in `jax.pmap`.
    reduction: str = "mean"  # What the all-reduce computes of "raw": "mean" or "sum".
    layouts: Mapping[int, str] = field(default_factory=lambda: {2: "IO", 4: "HWIO"})
    data_layout: str = "NHWC"
    replay: str | os.PathLike[str] | None = None  # Trace to load the state from, before each step.
    permute: int | None = None  # Seed to permute the examples of each replica.
    names: Mapping[str, str] = field(default_factory=dict)  # For `replay`: own name to its name.

    def __post_init__(self) -> None:
        self._wanted = set(range(self.steps) if isinstance(self.steps, int) else self.steps)
        self._number, self._arrays, self._received = 0, dict[str, Any](), dict[Any, list[Any]]()
        self._about: dict[str, Any] = {"steps": [], "settings": [], "gradients": []}
        states = {"params", "state", "opt_state"} & {*self.arguments}
        for role in sorted({"params", "batch"} - {*self.arguments} | states - {*self.outputs}):
            raise ValueError(f"{role} is missing; add it to arguments, and to outputs if returned")
        self._trace = _Trace(Path(self.replay), self._wanted, self.names) if self.replay else None

    def __enter__(self) -> "record":
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._wanted = set()
        if self._arrays:
            self._save()
        elif error is None:
            warnings.warn(f"{self.path}: none of {self._number} steps was recorded", stacklevel=2)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step, and records it if its number is among `steps`."""
        number, self._number = self._number, self._number + 1
        if number not in self._wanted:
            return self.step(*args, **kwargs)
        names, leaves, tree = _flatten((args, kwargs), skip=1)
        inputs = {role: _find(names, where, role) for role, where in self.arguments.items()}
        placed = _place(self.step, args, kwargs)
        replicas = _Replicas(placed, inputs, self.pmap)
        if not self._arrays:
            self._describe(inputs, replicas.values(placed, inputs, KINDS)[replicas.local[0][0]])
        if self._trace:
            self._load_state(number, leaves, inputs, replicas)
        for index, _ in inputs["batch"] if self.permute is not None else ():
            leaves[index] = replicas.permuted(leaves[index], (self.permute, number))
        args, kwargs = jax.tree.unflatten(tree, leaves)
        placed = _place(self.step, args, kwargs)
        found = {"before": replicas.values(placed, inputs, KINDS)}
        found |= {"data": replicas.values(placed, inputs, ["batch"])}
        found |= {"random": replicas.values(placed, inputs, ["key"])}
        kept = self._run_with_callbacks(args, kwargs, replicas)
        if not replicas.split_keys and all(device < 0 for _, device in self._received):
            found["random"] = {r: keys for r, keys in found["random"].items() if r == 0}
        result = self.step(*args, **kwargs)
        names, leaves, _ = _flatten(result)
        results = {role: _find(names, where, role) for role, where in self.outputs.items()}
        found |= {"after": replicas.values(leaves, results, KINDS)}
        found |= {"loss": replicas.values(leaves, results, ["loss"])}
        self._store(number, found | kept, replicas)
        return result

    def _run_with_callbacks(self, args: Any, kwargs: Any, replicas: "_Replicas") -> dict[str, Any]:
        """Returns the kept arrays, by kind and replica, of the second version of the step."""
        self._received.clear()
        copied = jax.tree.map(lambda a: a.copy() if isinstance(a, jax.Array) else a, (args, kwargs))
        with _RECORDER(self):
            jax.block_until_ready(self.step(*copied[0], **copied[1]))
        jax.effects_barrier()
        kept: dict[str, Any] = {}
        for (kind, device), calls in self._received.items():
            if len(calls) > 1 or device >= replicas.number:
                where = f"{len(calls)} calls on device {device} of {replicas.number}"
                raise ValueError(f"keep({kind!r}): {where}; call it once, and split the batch")
            owners = [r for r, _ in replicas.local if device in (-1, r)]
            kept.setdefault(kind, {}).update((replica, calls[0]) for replica in owners)
        return kept

    def _receive(self, kind: str, names: list[str], device: Any, *leaves: Any) -> None:
        self._received.setdefault((kind, int(device)), []).append([*map(_host, leaves)])
        if kind in ("raw", "sums", "clipped"):
            self._about["gradients"] = [name or "params" for name in names]

    def _describe(self, inputs: Mapping[str, Any], values: list[np.ndarray]) -> None:
        """Writes names, kinds and layouts of the variables, and finds them in the other trace."""
        shapes: dict[str, tuple[int, ...]] = {}
        self._about["variables"] = []
        pairs = [(role, name) for role in KINDS for _, name in inputs.get(role, [])]
        for (role, name), shape in zip(pairs, [value.shape for value in values], strict=True):
            entry = {"name": name if role == "params" else f"{role}/{name}", "kind": KINDS[role]}
            shapes |= {name: shape} if role == "params" else {}
            fitting = [w for w in shapes if f"/{name}".endswith(f"/{w}") and shapes[w] == shape]
            weight = max(fitting, key=len, default="") if role in ("params", "opt_state") else ""
            entry["layout"] = self.layouts.get(len(shape), "") if weight else ""
            if role == "opt_state":
                slot = name.removesuffix(weight).strip("/").split("/")[-1] or "momentum"
                entry |= {"of": weight, "slot": slot}
            self._about["variables"].append(entry)
        if self._trace:
            self._matches = self._trace.match(self._about["variables"], values)

    def _load_state(self, number: int, leaves: list[Any], inputs: Any, replicas: Any) -> None:
        """Replaces the variables among `leaves` by those of the same step in the other trace."""
        pairs = [(role, index) for role in KINDS for index, _ in inputs.get(role, [])]
        for (role, index), match in zip(pairs, self._matches, strict=True):
            values = self._trace.values(number, *match) if match else []
            each = self.pmap or (role == "key" and replicas.split_keys)  # One for each replica.
            if each and len(values) == replicas.number:
                joined = np.stack(values) if self.pmap else np.concatenate(values)
                leaves[index] = _like(leaves[index], joined)
            elif values and not (each and role == "key"):
                leaves[index] = _like(leaves[index], values[0])

    def _store(self, number: int, found: dict[str, Any], replicas: "_Replicas") -> None:
        """Keeps the arrays of a step until the end of the block."""
        about, settings = self._about, dict(self.optimizer)
        settings.pop("class", None)
        settings = {k: float(v(number)) if callable(v) else v for k, v in settings.items()}
        settings["weights"] = [v["name"] for v in about["variables"] if v["kind"] == "weight"]
        about["steps"].append(number)
        about["settings"].append([settings])
        about |= {"num_replicas": replicas.number, "replicas": [r for r, _ in replicas.local]}
        about["reduction"] = self.reduction if "raw" in found else ""
        if "sums" in found:
            found.setdefault("clipped", found["sums"])
        for replica, before in found["before"].items():  # Keys that the step does not return.
            found["after"][replica] += before[len(found["after"][replica]) :]
        convert = {"random": lambda array: array.view(np.uint8), "loss": np.squeeze}
        for kind, per_replica in found.items():
            for replica, arrays in per_replica.items():
                for index, array in enumerate(map(convert.get(kind, np.asarray), arrays)):
                    self._arrays[f"{len(about['steps'])}/{kind}/{replica}/{index}"] = array

    def _save(self) -> None:
        """Writes the file under another name first, then renames it."""
        optimizer = {k: v for k, v in self.optimizer.items() if not callable(v)}
        about = {"format": "lockstep trace", "version": 1, "framework": "jax", **self._about}
        about |= {"versions": {"jax": jax.__version__}, "order": "reduce, clip", "layers": []}
        about |= {"optimizer": optimizer | {"framework": "jax"}, "data_layout": self.data_layout}
        about |= {"permuted": self.permute, "replayed": self._trace and self._trace.path.name}
        path = Path(self.path)
        if jax.process_count() > 1:
            path = path.with_suffix(f".rank{jax.process_index()}.npz")
        temporary = path.with_name(f"{path.name}.tmp")
        with open(temporary, "wb") as file:
            np.savez(file, about=np.array(json.dumps(about)), **self._arrays)
        os.replace(temporary, path)


class _Replicas:
    """The devices of a step that have different examples; all devices if they have the same."""

    def __init__(self, placed: Sequence[Any], inputs: Mapping[str, Any], pmap: bool) -> None:
        batch = next(placed[i] for i, _ in inputs["batch"] if np.ndim(placed[i]))
        places = {jax.local_devices()[0]: (slice(None),)}
        if _split(batch):
            places = batch.sharding.devices_indices_map(batch.shape)
        distinct = {str(index[0]): device for device, index in reversed(places.items())}
        devices = [*distinct.values()][::-1] if len(distinct) > 1 else [*places]
        self.number, self.rows, self.pmap = len(devices), [places[d][0] for d in devices], pmap
        own = jax.process_index()
        self.local = [(r, d) for r, d in enumerate(devices) if d.process_index == own]
        keys = [placed[index] for index, _ in inputs.get("key", [])]
        self.split_keys = any(_split(key) and not key.is_fully_replicated for key in keys)

    def values(self, leaves: Sequence[Any], found: Any, roles: Iterable[str]) -> dict[int, Any]:
        """Returns the host arrays of each replica of this process, of all `roles`."""
        pairs = [(leaves[index], role) for role in roles for index, _ in found.get(role, [])]
        columns = [self._column(_plain(leaf), role) for leaf, role in pairs]
        return {r: [column[at] for column in columns] for at, (r, _) in enumerate(self.local)}

    def _column(self, leaf: Any, role: str) -> list[np.ndarray]:
        values = [leaf] * len(self.local)
        if self.pmap and np.shape(leaf)[:1] != (self.number,):
            raise ValueError(f"pmap: {role} of shape {np.shape(leaf)} has no axis of devices")
        whole = role in KINDS and role != "key"  # Also if each device has a part of it.
        if _split(leaf) and (self.pmap or not whole or leaf.is_fully_replicated):
            shards = {shard.device: shard.data for shard in leaf.addressable_shards}
            values = [shards[device] for _, device in self.local]
        return [_host(value)[0] if self.pmap else _host(value) for value in values]

    def permuted(self, leaf: Any, seed: Sequence[int]) -> Any:
        """Returns `leaf` with its examples in another order, each on the same replica."""
        generator, values = np.random.default_rng(seed), _host(leaf)
        for rows in self.rows if values.ndim else ():
            values[rows] = generator.permutation(values[rows], axis=int(self.pmap))
        return _like(leaf, values)


class _Trace:
    """The trace of another training, of one process or several."""

    def __init__(self, path: Path, wanted: set[int], names: Mapping[str, str]) -> None:
        files = [path] if path.exists() else sorted(path.parent.glob(f"{path.stem}.rank*.npz"))
        if not files:
            raise ValueError(f"replay={path}: no such file; record it first")
        self.path, self.names = path, names
        self.members = ChainMap(*[np.load(file) for file in files])
        self.about = json.loads(str(self.members["about"]))
        if missing := sorted(wanted - {*self.about["steps"]}):
            raise ValueError(f"replay={path}: no step {missing}; use steps={self.about['steps']}")

    def values(self, number: int, index: int, axes: Sequence[int]) -> list[np.ndarray]:
        """Returns a variable before step `number`, on each replica, with its axes in that order."""
        prefix = f"{self.about['steps'].index(number) + 1}/before"
        values = [self.members[f"{prefix}/{r}/{index}"] for r in range(self.about["num_replicas"])]
        return [value.transpose(axes) if axes else value for value in values]

    def match(self, variables: list[Any], arrays: list[np.ndarray]) -> list[Any]:
        """Returns index and axes in this trace of each variable; None for one to leave as it is."""
        kinds = [*KINDS.values()][: 4 if self.about["framework"] == "jax" else 2]
        names = [self.names.get(v["name"], v["name"]) for v in variables]
        theirs, matches = dict(enumerate(self.about["variables"])), list[Any]()
        for mine, name, array in zip(variables, names, arrays, strict=True):
            same = {i: v for i, v in theirs.items() if v["kind"] == mine["kind"] in kinds}
            named = [i for i, v in same.items() if v["name"] == name]
            others = [i for i, v in same.items() if v["name"] not in {*names, *self.names.values()}]
            options = named or ([] if mine["name"] in self.names else others)
            fits = [(i, _axes(same[i]["layout"], mine["layout"])) for i in options]
            first = self.about["steps"][0]
            fits = [fit for fit in fits if self.values(first, *fit)[0].shape == array.shape]
            if not fits and mine["kind"] in kinds[:3]:
                shapes = [(v["name"], self.values(first, i, ())[0].shape) for i, v in same.items()]
                raise ValueError(
                    f"replay={self.path}: nothing for {mine['name']} of shape {array.shape} among "
                    f"{shapes}; use names={{{mine['name']!r}: …}}"
                )
            matches.append(fits[0] if fits else None)
            theirs.pop(fits[0][0] if fits else -1, None)
        return matches


def _axes(theirs: str, mine: str) -> tuple[int, ...]:
    """Returns the order of the axes from one layout to the other, () if it does not change."""
    return tuple(map(theirs.index, mine)) if sorted(theirs) == sorted(mine) else ()


def _flatten(tree: Any, skip: int = 0) -> tuple[list[str], list[Any], Any]:
    """Returns the paths of the leaves, without the first `skip` keys, the leaves, the structure."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path[skip:], simple=True, separator="/") for path, _ in pairs]
    return names, [leaf for _, leaf in pairs], structure


def _find(names: list[str], where: Any, role: str) -> list[tuple[int, str]]:
    """Returns index and name of the leaves at `where`; the name is relative to a single place."""
    places = where if isinstance(where, tuple) else (where,)
    cut = 0 if len(places) > 1 else len(f"{where}/")
    found = [
        (index, name[cut:] or role)
        for place in places
        for index, name in enumerate(names)
        if f"{name}/".startswith(f"{place}/")
    ]
    if not found and role not in ("state", "opt_state"):  # They may be empty.
        raise ValueError(f"{role}: no array at {where!r} among {', '.join(names)}")
    return found


def _place(step: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns the leaves of the arguments, on the devices where the compiled step wants them."""
    leaves = jax.tree.leaves((args, kwargs))
    if not hasattr(step, "lower"):
        return leaves
    compiled = step.lower(*args, **kwargs).compile()
    shardings = compiled.in_tree.flatten_up_to(compiled.input_shardings)
    numbers = (bool, int, float, complex)  # Others without a dtype are static arguments.
    arrays = [i for i, a in enumerate(leaves) if hasattr(a, "dtype") or isinstance(a, numbers)]
    for index, sharding in zip(arrays, shardings, strict=True):
        if sharding and len(sharding.device_set) > 1 and not _split(leaves[index]):
            leaves[index] = jax.device_put(leaves[index], sharding)
    return leaves


def _split(leaf: Any) -> bool:
    """Returns whether `leaf` is an array on several devices."""
    return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1


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
        return jax.numpy.asarray(value)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])
