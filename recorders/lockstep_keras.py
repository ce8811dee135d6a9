"""Records each replica's results in some training steps of Keras, in a file of plain arrays.

This file is standalone: copy it beside your script. It needs TensorFlow, Keras 3 and NumPy.

    with lockstep_keras.record("two.npz", model, steps=[0, 1, 2]):
        model.fit(dataset)  # The model is compiled under `strategy.scope()`.

`verify --traces=one.npz,two.npz` of Lockstep compares such files. With the folder
`keras_comparison` beside this file, a script can compare its steps with one device:

    with Recorder(model, steps=3) as recorder:
        model.fit(dataset)
    print(compare(recorder, build_model))  # The builder is called outside of the scope.

A custom loop passes `optimizer`, and runs `strategy.run(recorder.wrap(replica_step), args=...)`.

The hooks replace methods of the model and the optimizer instances until the end of the block.
Recording does not change the training bitwise; other steps are not copied.
"""

import collections
import contextlib
import glob
import importlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.backend import get_keras_mask  # Masks have no public access.

FORMAT, VERSION = "lockstep trace", 1
LAYER_SETTINGS = {  # Attribute → key.
    "epsilon": "epsilon", "momentum": "momentum", "strides": "strides", "padding": "padding",
    "dilation_rate": "dilation",
}  # fmt: skip
TRANSPOSES = {("OIHW", "HWIO"): (2, 3, 1, 0), ("OI", "IO"): (1, 0)}  # (from, to) → axes.
Arrays = list[Any]  # Of `np.ndarray` and `Sparse`.
Path = str | os.PathLike


class Sparse(collections.namedtuple("Sparse", "values indices rows")):
    """A gradient of some rows of a table, like `tf.IndexedSlices`."""


class Recording:
    """Recorded steps in version 1 of the trace format, with attributes named after its keys.

    Attributes:
        steps: for each recorded step, (kind, replica) → arrays.
        numbers: numbers of these steps, from 0.
        structure: structure of "data"; see `to_json`.
        predicted: structure of "y_pred"; see `to_json`.
        whole_loss: whether the loss is computed once, from the predictions of all replicas.
    """

    def __init__(self, num_replicas: int):
        self.num_replicas = num_replicas
        self.steps: list[dict[tuple[str, int], Arrays]] = []
        self.numbers: list[int] = []
        self.framework, self.order, self.data_layout = "keras", "clip, reduce", ""
        self.variables: list[dict[str, str]] = []
        self.gradients: list[str] = []
        self.optimizer: dict[str, Any] = {}
        self.settings: list[list[dict[str, Any]]] = []
        self.layers: list[dict[str, Any]] = []
        self.permuted: int | None = None
        self.replayed: str | None = None
        self.structure: Any = None
        self.predicted: Any = None
        self.whole_loss = False

    @property
    def replicas(self) -> list[int]:
        """The replicas with recorded arrays: those of this process."""
        return sorted({replica for step in self.steps for _, replica in step})

    def describe(self, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
        """Describes the variables of a model and its optimizer, and the layers."""
        layers = [part for part in model._flatten_layers(include_self=False) if not part._layers]
        layouts = {}
        for layer in layers:
            if isinstance(layer, keras.layers.Conv2D):
                self.data_layout = {"channels_last": "NHWC"}.get(layer.data_format, "NCHW")
            if isinstance(layer, keras.layers.Conv2D | keras.layers.Dense) and layer.built:
                layout = "IO" if len(layer.kernel.shape) == 2 else "HWIO"
                layouts[getattr(layer.kernel, "path", "")] = layout
        self.layers = [
            {"name": layer.name, "class": type(layer).__name__}
            | {"weights": [weight.path for weight in layer.weights]}
            | {to: getattr(layer, own) for own, to in LAYER_SETTINGS.items() if hasattr(layer, own)}
            for layer in layers
        ]
        weights = [weight.path for weight in model.trainable_variables]
        self.variables = []
        for variable in model.variables:
            kind = "weight" if variable.path in weights else "statistic"
            kind = kind if is_float(variable) else "seed"
            layout = layouts.get(variable.path, "")
            self.variables.append({"name": variable.path, "kind": kind, "layout": layout})
        starts = {f"{weight.replace('/', '_')}_": weight for weight in weights}
        for variable in optimizer.variables:
            start = max(filter(variable.name.startswith, starts), key=len, default="")
            of, slot = starts.get(start, ""), variable.name.removeprefix(start)
            about = {"name": variable.path, "kind": "optimizer state", "of": of, "slot": slot}
            self.variables.append({**about, "layout": layouts.get(of, "")})

    def save(self, path: Path) -> None:
        """Writes a file when it is complete; process 0 of several processes `….rank0.npz`."""
        name, replicas = os.fspath(path), self.replicas
        if 0 < len(replicas) < self.num_replicas:
            name = f"{name.removesuffix('.npz')}.rank{replicas[0] // len(replicas)}.npz"
        with open(f"{name}.tmp", "wb") as file:
            self.write(file)
            file.flush()
            os.fsync(file.fileno())  # A power cut leaves the whole file, or none.
        os.replace(f"{name}.tmp", name)

    def write(self, file: BinaryIO) -> None:
        """Writes arrays POSITION/KIND/REPLICA/INDEX, and "about", a JSON text, as `.npz`."""
        arrays: dict[str, Any] = {}
        for position, step in enumerate(self.steps, start=1):
            for (kind, replica), values in step.items():
                for index, value in enumerate(values):
                    name = f"{position}/{kind}/{replica}/{index}"
                    parts = value._asdict() if isinstance(value, Sparse) else {"": value}
                    for part, array in parts.items():
                        arrays[f"{name}/{part}" if part else name] = np.asarray(array)
        about = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        about |= {"format": FORMAT, "version": VERSION, "steps": about.pop("numbers")}
        about |= {"replicas": self.replicas, "reduction": "sum"}
        about["versions"] = {p.__name__: p.__version__ for p in (keras, tf, np)}
        np.savez(file, **arrays, about=np.array(json.dumps(about, default=str)))

    @classmethod
    def load(cls, path: Path | BinaryIO, kinds: Collection[str] = ()) -> "Recording":
        """Reads a file, or those of all processes; only arrays of some kinds, if any are given.

        Raises:
            ValueError: the file does not exist, or is not a recording of this version.
        """
        files: list[Any] = [path]
        if isinstance(path, Path) and not os.path.exists(path):
            stem = os.fspath(path).removesuffix(".npz")
            files = sorted(glob.glob(f"{glob.escape(stem)}.rank*.npz"))
            if not files:
                raise ValueError(f"{path} does not exist; pass a file that record() has written")
        recording, parts = cls(0), collections.defaultdict[tuple, dict[str, Any]](dict)
        for file in files:
            with np.load(file, allow_pickle=False) as members:
                about = json.loads(str(members["about"])) if "about" in members else {}
                if (about.get("format"), about.get("version")) != (FORMAT, VERSION):
                    raise ValueError(f"{file} is not a recording in format version {VERSION}")
                recording.numbers = about.pop("steps")
                for name in vars(recording).keys() & about.keys():
                    setattr(recording, name, about[name])
                for name in set(members) - {"about"}:
                    position, kind, replica, index, *part = name.split("/")
                    if kind in (kinds or [kind]):
                        key = int(position) - 1, kind, int(replica), int(index)
                        parts[key]["".join(part)] = members[name]
        recording.steps = [{} for _ in recording.numbers]
        for (position, kind, replica, _), part in sorted(parts.items(), key=lambda item: item[0]):
            value = part[""] if "" in part else Sparse(**part)
            recording.steps[position].setdefault((kind, replica), []).append(value)
        return recording


class Hooks(contextlib.ExitStack):
    """Replaces methods of instances in a `with` block, without changing their classes."""

    def hook(self, owner: Any, name: str, wrapper: Callable) -> None:
        """Makes `owner.name(...)` call `wrapper(inner, ...)`, where `inner` is the method."""
        inner, hidden = getattr(owner, name), vars(owner).get(name)
        object.__setattr__(owner, name, lambda *args, **kwargs: wrapper(inner, *args, **kwargs))
        if hidden is None:
            self.callback(vars(owner).pop, name, None)
        else:  # Another hook, which was there before.
            self.callback(object.__setattr__, owner, name, hidden)


class Recorder(Recording):
    """Records steps of `model.fit`, or of a custom loop, in a `with` block.

    Args:
        model: a compiled model, or with `optimizer` any model; under a strategy or not.
        steps: number of first steps to record, or numbers of steps, from 0.
        optimizer: optimizer of a custom loop.
        replay: a recording whose weights and statistics are assigned before each step; from a
            recording of Keras also optimizer state (without learning rate) and seeds.
        permute: seed for a permutation of each replica's examples in these steps.
        names: name of a variable → its name in `replay`; others are matched in order, by kind and
            shape.

    Raises:
        ValueError: no hook can run in this training, or `replay` lacks steps or variables.
    """

    def __init__(
        self, model: keras.Model, steps: int | Collection[int] = 3, *,
        optimizer: keras.optimizers.Optimizer | None = None,
        replay: Path | None = None, permute: int | None = None,
        names: Mapping[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(model.distribute_strategy.num_replicas_in_sync)
        optimizer = optimizer or getattr(model, "optimizer", None)
        if optimizer is None:
            raise ValueError(f"model {model.name} is not compiled; call model.compile first")
        if model.compiled and model.jit_compile is True:
            raise ValueError(
                f"model {model.name} is compiled with jit_compile=True, and XLA does not run the"
                " hooks; compile it with jit_compile=False to record it"
            )
        if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
            raise ValueError(
                f"model {model.name} is compiled with a MultiOptimizer, whose optimizers no hook"
                " sees; record it with one optimizer at a time, for all weights"
            )
        self._model, self._outer, self._hooks = model, optimizer, Hooks()
        self._optimizer = inner_optimizer(optimizer)
        self._wanted = range(steps) if isinstance(steps, int) else steps
        self.permuted, self.replayed = permute, None if replay is None else os.fspath(replay)
        self._replay = None if replay is None else Replay(replay, self._wanted, names or {})
        self._kept: dict[tuple[int, str, int], Arrays] = {}
        self._num_seen: collections.Counter[int] = collections.Counter()
        self._number: dict[int, tf.Tensor] = {}  # Step number of a replica, or -1.

    def recording(self) -> Recording:
        """Returns what was recorded, without the hooks."""
        recording = Recording(self.num_replicas)
        vars(recording).update({name: getattr(self, name) for name in vars(recording)})
        return recording

    def wrap(self, step: Callable) -> Callable:
        """Returns a custom loop's replica step with hooks; its arguments are the batch."""
        if not self._optimizer.built:
            with self._model.distribute_strategy.scope():
                self._optimizer.build(self._model.trainable_variables)
        return partial(self._step, step)

    def __enter__(self) -> "Recorder":
        model, optimizer, hook = self._model, self._optimizer, self._hooks.hook
        hook(model, "train_step", self._step)
        hook(model, "compute_loss", self._compute_loss)
        hook(optimizer, "_backend_apply_gradients", self._apply_gradients)
        hook(optimizer, "_clip_gradients", self._clip_gradients)
        hook(optimizer, "_all_reduce_sum_gradients", self._all_reduce)
        model.train_function = None  # One that is traced already has no hooks.
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()
        self._model.train_function = None
        # A step that an error has ended is omitted.
        self.numbers = sorted({number for number, kind, _ in self._kept if kind == "after"})
        self.steps, self.settings = [], []
        for wanted in self.numbers:
            step = {(k, r): self._kept[n, k, r] for n, k, r in sorted(self._kept) if n == wanted}
            rates = [step.pop(key) for key in list(step) if key[0] == "learning_rate"]
            self.steps.append(step)
            self.settings.append(settings_of(self._model, self._optimizer, float(rates[0][0])))
        self.optimizer = {"class": type(self._optimizer).__name__, "framework": "keras"}
        self.optimizer |= constants_of(self._optimizer)
        if self._replay and self._replay.error:  # Without the notes of a traced function.
            raise ValueError(self._replay.error) from None

    def _begin(self, replica: int) -> tf.Tensor:
        """Returns the number of the step that a replica begins, -1 if it is not recorded."""

        def begin() -> np.int64:
            number = self._num_seen[replica]
            self._num_seen[replica] += 1
            return np.int64(number if number in self._wanted else -1)

        return tf.numpy_function(begin, [], tf.int64)

    def _keep(self, kind: str, values: Sequence[Any]) -> None:
        """Copies tensors and variables of this replica, if its step is recorded."""
        replica = replica_id()
        number, is_sparse = self._number[replica], [isinstance(v, tf.IndexedSlices) for v in values]

        def keep(number: np.int64, *arrays: np.ndarray) -> np.int64:
            copies = map(plain_copy, arrays)  # Buffers are reused.
            self._kept[int(number), kind, replica] = [
                Sparse(next(copies), next(copies), int(next(copies))) if sparse else next(copies)
                for sparse in is_sparse
            ]
            return number

        def copy() -> tf.Tensor:
            flat: list[tf.Tensor] = []
            for value, sparse in zip(values, is_sparse, strict=True):
                parts = (value.values, value.indices, value.dense_shape[0]) if sparse else (value,)
                flat += map(to_numpy_dtype, parts)
            return tf.numpy_function(keep, [number, *flat], tf.int64)

        tf.cond(number >= 0, copy, lambda: number)

    def _step(self, inner: Callable, *data: Any) -> Any:
        state, replica = [*self._model.variables, *self._outer.variables], replica_id()
        self.describe(self._model, self._outer)
        self._number[replica] = number = self._begin(replica)
        if self._replay:
            self._replay.assign(state, self.variables, number, replica)
        if self.permuted is not None:
            data = permuted(data, number, [self.permuted, replica])
        self.structure = to_json(data[0] if len(data) == 1 else data)
        self._keep("data", leaves(data))
        self._keep("before", state)
        self._keep("learning_rate", [self._optimizer.learning_rate])
        result = inner(*data)
        self._keep("after", state)
        return result

    def _compute_loss(self, inner: Callable, *args: Any, **kwargs: Any) -> tf.Tensor:
        loss = inner(*args, **kwargs)
        names = ("x", "y", "y_pred", "sample_weight", "training")
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        if call.get("training", True):
            predictions = leaves(call["y_pred"])
            self.predicted = to_json(call["y_pred"])
            self._keep("y_pred", predictions)
            masks = map(get_keras_mask, predictions)
            self._keep("mask", [tf.zeros(()) if mask is None else mask for mask in masks])
            self._keep("loss", [loss, regularisation(self._model)])
        return loss

    def _apply_gradients(self, inner: Callable, gradients: Sequence, variables: Sequence) -> Any:
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        self.gradients = [getattr(v, "path", v.name) for _, v in pairs]
        self._keep("raw", [g for g, _ in pairs])
        return inner(gradients, variables)

    def _clip_gradients(self, inner: Callable, gradients: Sequence) -> Any:
        clipped = inner(gradients)
        self._keep("clipped", [g for g in clipped if g is not None])
        return clipped

    def _all_reduce(self, inner: Callable, pairs: Sequence) -> Any:
        reduced = list(inner(pairs))
        self._keep("sums", [g for g, _ in reduced if g is not None])
        return reduced


class Replay:
    """Assigns the states of another recording; see `Recorder` for the arguments."""

    def __init__(self, path: Path, wanted: Collection[int], names: Mapping[str, str]):
        self._path, self._names, self.error = path, names, ""
        self._trace = Recording.load(path, kinds=["before"])
        if missing := sorted(set(wanted) - set(self._trace.numbers)):
            raise ValueError(f"replay={path} lacks steps {missing}; it has {self._trace.numbers}")

    def assign(
        self, state: Sequence[keras.Variable], variables: Sequence[dict[str, str]],
        number: tf.Tensor, replica: int,
    ) -> None:  # fmt: skip
        """Assigns the state before a step to this replica's copies, if the step is recorded."""
        trace, copies_of = self._trace, tf.distribute.get_strategy().experimental_local_results
        found = self._matched([tuple(variable.shape) for variable in state], variables)
        copies = [copies_of(state[own].value) for own, *_ in found]

        def read(number: np.int64) -> list[np.ndarray]:
            step = trace.steps[trace.numbers.index(int(number))]
            before = step["before", replica % trace.num_replicas]
            return [np.transpose(before[other], axes) for _, other, axes in found]

        def assign() -> tf.Tensor:
            first = trace.steps[0]["before", 0]
            dtypes = [first[other].dtype for _, other, _ in found]
            arrays = tf.numpy_function(read, [number], dtypes)
            for copy, array in zip(copies, arrays, strict=True):
                local = copy[replica % len(copy)]
                local.assign(tf.cast(tf.reshape(array, local.shape), local.dtype))
            return number

        tf.cond(number >= 0, assign, lambda: number)

    def _matched(
        self, shapes: Sequence[tuple], variables: Sequence[dict[str, str]]
    ) -> list[tuple[int, int, tuple[int, ...]]]:
        """Returns triples: index of a variable, its index in the other recording, transposition."""
        trace, arrays = self._trace, self._trace.steps[0]["before", 0]
        kinds = ["weight", "statistic"] + ["optimizer state", "seed"] * (trace.framework == "keras")
        free, found, partners = list(range(len(arrays))), [], {"": ""}
        if unknown := self._names.keys() - {about["name"] for about in variables}:
            self._fail(f"names has {', '.join(sorted(unknown))}, which the model does not have")
        for own, (shape, about) in enumerate(zip(shapes, variables, strict=True)):
            if about["kind"] not in kinds or about.get("slot") == "learning_rate":
                continue
            wanted = {"kind": about["kind"], "slot": about.get("slot")}
            if "of" in about:
                wanted["of"] = partners[about["of"]]
            if about["name"] in self._names:
                wanted["name"] = self._names[about["name"]]
            fits = []
            for other in free:
                theirs, array = trace.variables[other], arrays[other]
                layouts = theirs.get("layout", ""), about["layout"]
                axes = TRANSPOSES.get(layouts, tuple(range(array.ndim)))
                same = all(theirs.get(key) == value for key, value in wanted.items())
                if same and tuple(array.shape[axis] for axis in axes) == shape:
                    fits.append((theirs["name"] != about["name"], other, axes))
            if not fits and about["kind"] in ("optimizer state", "seed"):
                continue  # For another optimizer, or a layer that the other model lacks.
            if not fits:
                listed = [
                    f"{theirs['name']} {array.shape}"
                    for theirs, array in zip(trace.variables, arrays, strict=False)
                    if theirs["kind"] == about["kind"]
                ]
                self._fail(
                    f"no {about['kind']} fits {about['name']} {shape}; it has"
                    f" {', '.join(listed) or 'none'}; pass names={{{about['name']!r}: its name}}"
                )
            _, other, axes = min(fits)
            free.remove(other)
            partners[about["name"]] = trace.variables[other]["name"]
            found.append((own, other, axes))
        return found

    def _fail(self, text: str) -> None:
        self.error = f"replay={self._path}: {text}"
        raise ValueError(self.error)


@contextlib.contextmanager
def record(
    path: Path, model: keras.Model, steps: int | Collection[int] = 3, **options: Any
) -> Iterator[Recorder]:
    """Records steps in a `with` block and saves them at its end, even if an error ends it.

    See `Recorder` for the arguments.
    """
    recorder = Recorder(model, steps, **options)
    try:
        with recorder:
            yield recorder
    finally:
        if recorder.steps:
            recorder.save(path)
    if not recorder.steps:
        raise ValueError(f"{path} is not written: no step was recorded; train within the block")


def compare(*args: Any, **kwargs: Any) -> Any:
    """Compares a recording with one device; see `keras_comparison.compare`."""
    return comparison().compare(*args, **kwargs)


def compare_evaluation(*args: Any, **kwargs: Any) -> Any:
    """Compares an evaluation with one device; see `keras_comparison.compare_evaluation`."""
    return comparison().compare_evaluation(*args, **kwargs)


def comparison() -> Any:
    """Returns the package in the folder beside this file."""
    name = f"{__name__.rpartition('lockstep_keras')[0]}keras_comparison"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(
            "compare needs the folder keras_comparison: copy it beside lockstep_keras.py, or save"
            " the recording and run `python main.py verify --traces=FILE`",
            name=name,
        ) from None


def permuted(data: Any, number: tf.Tensor, seed: Sequence[int]) -> Any:
    """Returns a batch with its examples in another order, if its step is recorded."""
    parts = leaves(data)

    def order(number: np.int64, size: np.int32) -> np.ndarray:
        return np.random.default_rng([*seed, int(number)]).permutation(int(size))

    def permute() -> list[tf.Tensor]:
        chosen = tf.numpy_function(order, [number, tf.shape(parts[0])[0]], tf.int64)
        return [tf.ensure_shape(tf.gather(part, chosen), part.shape) for part in parts]

    moved = iter(tf.cond(number >= 0, permute, lambda: [tf.identity(part) for part in parts]))
    return tree.map_structure(lambda leaf: None if leaf is None else next(moved), data)


def settings_of(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, learning_rate: float
) -> list[dict[str, Any]]:
    """Returns groups of weights with the optimizer's settings for them in a step."""
    groups: dict[float, list[str]] = {}  # By weight decay, from which weights can be excluded.
    for weight in model.trainable_variables:
        decays = optimizer.weight_decay and optimizer._use_weight_decay(weight)
        groups.setdefault(optimizer.weight_decay if decays else 0.0, []).append(weight.path)
    settings = {**constants_of(optimizer), "learning_rate": learning_rate}
    return [{**settings, "weight_decay": d, "weights": paths} for d, paths in groups.items()]


def constants_of(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Returns the settings of an optimizer that are numbers."""
    config = optimizer.get_config().items()
    return {name: value for name, value in config if isinstance(value, bool | int | float)}


def leaves(structure: Any) -> list[Any]:
    """Returns the leaves of a nest, without None."""
    return [leaf for leaf in tree.flatten(structure) if leaf is not None]


def to_json(structure: Any) -> Any:
    """Describes a nest of tuples, lists and dicts: leaves are numbers, in the order of `leaves`."""
    numbers = iter(range(len(tree.flatten(structure))))
    numbered = tree.map_structure(lambda x: None if x is None else next(numbers), structure)

    def describe(nest: Any) -> Any:
        if isinstance(nest, Mapping):
            return {"dict": {key: describe(value) for key, value in nest.items()}}
        if isinstance(nest, tuple | list):
            kind = "list" if isinstance(nest, list) else "tuple"
            return {kind: [describe(value) for value in nest]}
        return nest

    return describe(numbered)


def plain_copy(array: Any) -> np.ndarray:
    """Returns a copy of an array, with strings, which are objects, as bytes of one length."""
    copy = np.array(array)
    return copy.astype(np.bytes_) if copy.dtype == object else copy


def regularisation(model: keras.Model) -> tf.Tensor:
    """Returns the sum of `model.losses` for this replica."""
    losses = [model._aggregate_additional_loss(loss) for loss in model.losses]
    return tf.add_n(losses) if losses else tf.zeros(())


def is_float(variable: keras.Variable) -> bool:
    """Returns whether a variable holds floating-point numbers; seeds hold integers."""
    return keras.backend.is_float_dtype(variable.dtype)


def to_numpy_dtype(value: Any) -> tf.Tensor:
    """Returns a tensor, or a variable's value; bfloat16, which NumPy cannot save, as float32."""
    tensor = tf.convert_to_tensor(value.value if isinstance(value, keras.Variable) else value)
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor


def inner_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the inner optimizer of a `LossScaleOptimizer`, which receives unscaled gradients."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def replica_id() -> int:
    """Returns the number of this replica."""
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))
