"""Wraps a training step, records some of its calls, and describes its variables."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lockstep.data.trace import (
    OF_VARIABLES,
    SEED,
    STATE,
    STATISTIC,
    WEIGHT,
    Mesh,
)
from lockstep.recorders.common import (
    DEFAULT_STEPS,
    Path,
    Request,
    rank_path,
    request_of,
    require,
    require_type,
)
from lockstep.recorders.jax.arrays import is_array, like, placement_of, plain
from lockstep.recorders.jax.devices import Lowered, Replicas, has_axis
from lockstep.recorders.jax.gradients import Gradients, Weight, split_by
from lockstep.recorders.jax.keeping import GRADIENTS, Kept
from lockstep.recorders.jax.paths import (
    Shapes,
    carried_paths,
    flatten,
    found_at,
    path_of,
    tail,
    weights_of,
    without_role,
)
from lockstep.recorders.notes import IDS, Notes
from lockstep.recorders.output import Output
from lockstep.recorders.parts import members_of, variable_of
from lockstep.recorders.states import Own, States
from lockstep.recording import NotRecording, described

KINDS = {"params": WEIGHT, "state": STATISTIC, "opt_state": STATE, "key": SEED}
_LAYOUTS = {2: "IO", 4: "HWIO"}  # Number of axes of a weight → its layout.


class Recorder:
    """Wraps a training step and records some of its calls; a context manager. See `record`."""

    def __init__(
        self, request: Request, step: Callable[..., Any], arguments: Mapping[str, Any],
        outputs: Mapping[str, Any], optimizer: Mapping[str, Any], *, pmap: bool | Sequence[str],
        reduction: str, layouts: Mapping[int, str],
    ) -> None:  # fmt: skip
        self._request, self.step, self.arguments, self.outputs = request, step, arguments, outputs
        self.optimizer, self.pmap, self.reduction = optimizer, pmap, reduction
        self.layouts = layouts
        self._wanted, self._number = request.wanted, request.first_step
        self._kept, self._gradients, self._notes = Kept(), Gradients(), Notes()
        self._output: Output | None = None  # From the first recorded step.
        own = {"steps": [], "settings": [], "gradients": self._gradients.names}
        self._about: dict[str, Any] = {**own, "variables": []}
        self._shardings = dict[str, Any]()  # Of "KIND/INDEX".
        self._has_mesh = True  # Until a step has none.
        self._carried: dict[str, str] | None = None  # Path of an argument → that of the result.
        self._weights = dict[str, str]()  # Path of a weight → its name.
        self._states: States | None = None
        if request.replay:
            self._states = States("jax", request.replay, request.wanted, request.names)

    def __enter__(self) -> "Recorder":
        self._notes.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._wanted = set()
        self._notes.__exit__()
        if self._output:
            self._output.close(self._about | self._description(error))
        elif error is None:
            warnings.warn(
                f"{self._request.path}: none of {self._trained} steps was recorded", stacklevel=2
            )

    def _description(self, error: BaseException | None) -> dict[str, Any]:
        optimizer = {k: v for k, v in self.optimizer.items() if not callable(v)}
        return {
            **self._request.about("jax", error, self._states),
            "versions": {"jax": jax.__version__},
            "device": jax.default_backend(),
            "layers": [],
            "optimizer": optimizer | {"framework": "jax"},
            "left_out": [*self._gradients.left_out],
            "modules": self._kept.modules,
            "trained": self._trained,
        }

    @property
    def _trained(self) -> int:
        return self._number - self._request.first_step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step, and records it if its number is among `steps`."""
        number, self._number, ids = self._number, self._number + 1, self._notes.take()
        if number not in self._wanted:
            if self._output:
                self._output.forget()
            return self.step(*args, **kwargs)
        names, leaves, tree = flatten((args, kwargs), skip=1)
        arrays = {i: plain(leaf) for i, leaf in enumerate(leaves) if is_array(leaf)}
        inputs = {r: found_at(names, where, r, arrays) for r, where in self.arguments.items()}
        inputs = self._with_carried(names, inputs, args, kwargs)
        lowered = Lowered(self.step, args, kwargs)
        placed = lowered.placed(leaves)
        replicas = Replicas(placed, inputs, self.pmap, self._shardings, has_mesh=self._has_mesh)
        self._has_mesh = bool(replicas.mesh)
        variables = self._describe(leaves, inputs)
        self._request.choose_sample(_size_of_weights(leaves, variables))
        found = dict[str, Any]()
        if self._states:
            found["replaced"] = replicas.columns("replaced", placed, inputs, KINDS)
            self._load(number, leaves, variables, has_keys=not replicas.split_keys)
        if (seed := self._request.permute) is not None:
            for index, _ in inputs["batch"]:
                leaves[index] = replicas.permuted(leaves[index], (seed, number))
        args, kwargs = jax.tree.unflatten(tree, leaves)
        placed = lowered.placed(leaves)
        if "computed_in" not in self._about:
            self._about["computed_in"] = lowered.computed_in()
        found["data"] = replicas.columns("data", placed, inputs, ["batch"])
        if ids:  # Those of all replicas here, one after another.
            found[IDS] = [[np.concatenate(ids), *[None] * (len(replicas.local) - 1)]]
        found["before"] = replicas.columns("before", placed, inputs, KINDS)
        if self._request.keeps_start and not self._about["steps"]:
            found["start"] = found["before"]
        found["random"] = replicas.columns("random", placed, inputs, ["key"])
        sizes = next([len(a) for a in column] for column in found["data"] if column[0].ndim)
        kept = self._kept.run(self.step, args, kwargs, replicas, sizes)
        result = self.step(*args, **kwargs)
        found |= self._results(result, replicas, found["before"]) | kept
        self._store(number, found, replicas)
        return result

    def _results(self, result: Any, replicas: Replicas, before: list[Any]) -> dict[str, Any]:
        """Returns the losses and the state after a step."""
        names, leaves, _ = flatten(result)
        arrays = {i: leaf for i, leaf in enumerate(leaves) if is_array(leaf)}
        outputs = {r: found_at(names, where, r, arrays) for r, where in self.outputs.items()}
        if self._carried:
            carried = [(names.index(path), path) for path in self._carried.values()]
            outputs["state"] = [*outputs.get("state", []), *carried]
        return {
            "loss": replicas.columns("loss", leaves, outputs, ["loss"]),
            # Keys that are not returned are left out: the script makes those of the next step.
            "after": replicas.columns("after", leaves, outputs, KINDS, before),
        }

    def _with_carried(
        self, names: list[str], inputs: dict[str, Any], args: Any, kwargs: Any
    ) -> dict[str, Any]:
        """Returns the inputs with what the step takes and returns under no name of `arguments`."""
        if self._carried is None:
            given = without_role((args, kwargs), 1, self.arguments.values())
            returned = jax.eval_shape(
                lambda: without_role(self.step(*args, **kwargs), 0, self.outputs.values())
            )
            self._carried = carried_paths(given, returned)
        known = {name for _, name in inputs.get("state", [])}
        found = [(names.index(path), tail(path) or path) for path in self._carried]
        found = [(i, names[i] if name in known else name) for i, name in found]
        return inputs | ({"state": [*inputs.get("state", []), *found]} if found else {})

    def _describe(self, leaves: list[Any], inputs: Mapping[str, Any]) -> list[tuple[int, Own]]:
        """Returns index among the leaves, and description, of each variable."""
        shapes = {
            role: {n: np.shape(plain(leaves[i]))[has_axis(self.pmap, role) :] for i, n in pairs}
            for role, pairs in inputs.items()
        }
        slots = self._slots(shapes["params"], shapes.get("opt_state", {}))
        variables = list[tuple[int, Own]]()
        for role, index, name in [(r, *pair) for r in KINDS for pair in inputs.get(r, [])]:
            shape, dtype = shapes[role][name], np.result_type(plain(leaves[index])).kind
            if dtype == "c":
                raise ValueError(
                    f"{name} is complex, which cannot be recorded; keep its real and imaginary part"
                    " as one real array"
                )
            weight, slot = name if role == "params" else "", name.split("/")[-1]
            entry = {"name": name if role in ("params", name) else f"{role}/{name}"}
            entry |= {"kind": KINDS[role]}
            if role == "state" and dtype in "iub":  # A counter, as of steps.
                entry |= {"kind": STATE, "of": "", "slot": slot}
            if role == "opt_state":
                weight, slot = slots.get(name, ("", slot))
                entry |= {"of": weight, "slot": slot or "momentum"}
            entry["layout"] = self.layouts.get(len(shape), "") if weight else ""
            variables.append((index, Own(entry, shape, dtype)))
        self._about["variables"] = [own.about for _, own in variables]
        return variables

    def _slots(self, weights: Shapes, states: Shapes) -> dict[str, tuple[str, str]]:
        """Returns state → its weight and slot, by names; notes the paths of the weights."""
        self._weights, paths = (
            {path_of(name, self.arguments[role], role): name for name in own}
            for role, own in (("params", weights), ("opt_state", states))
        )
        found = weights_of(
            {path: weights[name] for path, name in self._weights.items()},
            {path: states[name] for path, name in paths.items()},
        )
        return {paths[path]: (self._weights[of], slot) for path, (of, slot) in found.items()}

    def _load(
        self, number: int, leaves: list[Any], variables: list[tuple[int, Own]], has_keys: bool
    ) -> None:
        """Replaces the variables among `leaves` by those of the other recording before a step."""
        states, own = self._states, [each for _, each in variables]
        assert states
        kinds = [*KINDS.values()][: 2 if states.framework != "jax" else 3 + has_keys]
        found, before = states.sources(own, kinds), states.before(number, 0)
        states.require_all(own, found, kinds)
        for place, source in found.items():
            index, array = variables[place][0], source.of(before)
            leaves[index] = leaves[index] if array is None else like(leaves[index], array)

    def _store(self, number: int, found: dict[str, Any], replicas: Replicas) -> None:
        """Writes the arrays of a step."""
        if self._output is None:
            path, several = self._request.path, jax.process_count() > 1
            self._output = Output(rank_path(path, jax.process_index()) if several else path)
        about, settings = self._about, {k: v for k, v in self.optimizer.items() if k != "class"}
        settings = {k: float(v(number)) if callable(v) else v for k, v in settings.items()}
        settings["weights"] = [v["name"] for v in about["variables"] if v["kind"] == WEIGHT]
        about["steps"].append(number)
        about["settings"].append([settings])
        found = self._with_placements(found, replicas)
        about["reduction"] = self.reduction if "raw" in found else ""
        one_key = not replicas.split_keys and self._kept.is_of_one_program
        texts = dict(about.get("placements", {}))
        for key, columns in found.items():
            kind, _, number_of_module = key.partition("/")
            for index, column in enumerate(columns, int(number_of_module or 0)):
                text = texts.get(f"{kind}/{index}", "")
                # Of a weight without a gradient, the column is empty.
                for (replica, _), array in zip(replicas.local, column, strict=bool(column)):
                    if array is None or (kind == "random" and one_key and replica > 0):
                        continue  # One program draws the numbers of all devices.
                    array = array.view(np.uint8) if kind == "random" else array
                    array = array.squeeze() if kind == "loss" else array
                    self._put(kind, replica, index, array, text)

    def _put(self, kind: str, replica: int, index: int, array: np.ndarray, text: str) -> None:
        """Writes an array of a replica, or a sample of it; `text` says how it is a part."""
        about, sizes = self._about, self._about.get("mesh", {})
        assert self._output
        variable = variable_of(about, kind, index)
        found = members_of(
            self._request.sample, kind, array, variable.get("layout", ""), text, sizes,
            Mesh(sizes, ()).coordinates(replica),
        )  # fmt: skip
        if found.shape and kind in OF_VARIABLES:
            variable["shape"] = found.shape
        if text:
            about["placements"][f"{kind}/{index}"] = found.text
        for end, each in found.arrays.items():
            self._output.put(f"{len(about['steps'])}/{kind}/{replica}/{index}{end}", each)

    def _with_placements(self, found: dict[str, Any], replicas: Replicas) -> dict[str, Any]:
        """Returns the arrays of a step with gradients in their order.

        Describes the devices, and on a mesh how the arrays of each one are parts of whole ones.
        """
        kept, sizes = self._kept, dict(replicas.mesh.shape) if replicas.mesh else {}
        texts = dict(kept.placements) if sizes else {}
        for key, sharding in self._shardings.items():
            kind, place = key.split("/")
            if sharding:
                ndim = found[kind][int(place)][0].ndim
                texts[key] = placement_of(sharding.spec, ndim, kind == "data")
                if kind == "before" and "start" in found:
                    texts[f"start/{place}"] = texts[key]
        weights = {
            path: Weight(name, found["before"][index][0].shape, texts.get(f"before/{index}", ""))
            for index, (path, name) in enumerate(self._weights.items())
        }
        columns, own = self._gradients.sort(
            found, kept.paths, kept.texts, weights, sizes, replicas.batch_axes
        )
        ranks = [replica for replica, _ in replicas.local]
        if sizes:
            split = split_by((own[key] for key in own if key.startswith("raw/")), sizes)
            data_axes = [axis for axis in replicas.batch_axes if axis not in split]
            number = math.prod(sizes[axis] for axis in data_axes)
            placements = {key: text for key, text in (texts | own).items() if text}
            self._about |= {"mesh": sizes, "data_axes": data_axes, "placements": placements}
            self._about |= {"num_replicas": number, "ranks": ranks}
        else:
            self._about |= {"num_replicas": replicas.number, "replicas": ranks}
        return {kind: x for kind, x in found.items() if kind not in GRADIENTS} | columns


def _size_of_weights(leaves: Sequence[Any], variables: Sequence[tuple[int, Own]]) -> int:
    """Returns the bytes of one copy of all weights."""
    weights = [(index, own) for index, own in variables if own.about["kind"] == WEIGHT]
    sizes = (math.prod(own.shape) * np.result_type(leaves[i]).itemsize for i, own in weights)
    return sum(sizes)


def record(
    path: Path | None, step: Callable[..., Any], arguments: Mapping[str, Any],
    outputs: Mapping[str, Any], optimizer: Mapping[str, Any] | None = None,
    steps: int | Sequence[int] = DEFAULT_STEPS, pmap: bool | Sequence[str] = False,
    reduction: str = "mean", layouts: Mapping[int, str] | None = None,
    replay: Path | None = None, permute: int | None = None, names: Mapping[str, str] | None = None,
    sample: int | None = None, start: bool = False, first_step: int = 0,
) -> Recorder | NotRecording:  # fmt: skip
    """Wraps a training step and records some of its calls, in a `with` block.

    `lockstep.assert_same_training` gives path, steps, replay and permute in place of the arguments.

    Args:
        path: file to write at the end of the block; None to record only what `lockstep run` asks
            for.
        step: from `jax.jit` or `jax.pmap`, or a function that calls such functions.
        arguments: where "params", "batch", and optionally "state", "opt_state" and "key" are in its
            arguments.
        outputs: where the same, without "batch", and "loss" are in its result.
        optimizer: settings: values, or functions of the number of the step.
        steps: numbers of steps to record, from 0; or how many first steps.
        pmap: True if all arrays have a first axis of devices, as in `jax.pmap`; if `in_axes` is
            None for some, the names of the `arguments` that have one, as in ("batch", "key").
        reduction: what the all-reduce computes of "raw": "mean" or "sum".
        layouts: number of axes of a weight → its layout; by default {2: "IO", 4: "HWIO"}.
        replay: recording whose state is loaded before each step.
        permute: seed to permute the examples of each replica.
        names: name of a variable → its name in `replay`.
        sample: elements that are kept of each array, with random sums; 0 for whole arrays. None: as
            in `replay`, else 4,096 above 64 MiB of weights; then the first step alone is recorded
            by default.
        start: whether a sampled recording has the whole state before its first step, too, which
            `replay` needs.
        first_step: number of the first step of this process, which may resume a training.

    Returns:
        A context manager that gives the step to call.

    Raises:
        ValueError: a place of an array is missing, or `replay` lacks steps or the whole state.
    """
    require(callable(step), f"step: must be a function, as from jax.jit, and is {described(step)}")
    for key, value in (("arguments", arguments), ("outputs", outputs)):
        require_type(key, value, Mapping, "the places of arrays by their names")
    require_type("optimizer", optimizer, Mapping | None, "settings by their names")
    require_type("layouts", layouts, Mapping | None, "layouts by numbers of axes")
    require_type("pmap", pmap, bool | Sequence, "True, or names of arguments")
    if type(step).__module__.startswith("flax.nnx"):
        raise ValueError(
            "the step of nnx.jit changes its arguments, and record_jax needs one that returns its"
            " state; use jax.jit for a step that gets nnx.state(model), calls nnx.merge, and"
            " returns nnx.state"
        )
    states = {"params", "state", "opt_state"} & {*arguments}
    for role in sorted({"params", "batch"} - {*arguments} | states - {*outputs}):
        raise ValueError(f"{role} is missing; add it to arguments, and to outputs if returned")
    request = request_of(
        path, steps=steps, replay=replay, permute=permute, names=names, sample=sample, start=start,
        first_step=first_step, modules=False,
    )  # fmt: skip
    if request is None:
        return NotRecording(step)
    return Recorder(
        request, step, arguments, outputs, optimizer or {}, pmap=pmap, reduction=reduction,
        layouts=_LAYOUTS if layouts is None else layouts,
    )  # fmt: skip
