"""Records each replica's results in some training steps of Keras, in a file of plain arrays.

This file is standalone: copy it beside your script, or `from lockstep import record_keras`. It
needs TensorFlow, Keras 3 and NumPy.

    with record_keras.record("two.npz", model, steps=[0, 1, 2]):
        model.fit(dataset)  # The model is compiled under `strategy.scope()`.

A custom loop passes its optimizer, and wraps the function of a replica:

    with record_keras.record("two.npz", model, optimizer, steps=3) as recorder:
        recorded_step = recorder.wrap(replica_step)

        @tf.function  # Traced within the block.
        def train_step(batch):
            strategy.run(recorded_step, args=(batch,))

`python -m lockstep one.npz two.npz` compares such files. With the package installed, a script can
compare its steps with one device:

    with record_keras.Recorder(model, steps=3) as recorder:
        model.fit(dataset)
    print(lockstep.compare(recorder, model=build_model))  # Called outside of the scope.

The hooks replace methods of the model and the optimizer instances, and `GradientTape.gradient`,
until the end of the block.
Recording does not change the training bitwise; other steps are not copied.
"""

import collections
import contextlib
import glob
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.backend import get_keras_mask  # Masks have no public access.

FORMAT: dict[str, Any] = {"format": "lockstep trace", "version": 2}
DEFAULT_NUM_STEPS = 3  # A shorter training has recorded all that was asked for.
LAYER_SETTINGS = {  # Attribute → key.
    "epsilon": "epsilon", "momentum": "momentum", "strides": "strides", "padding": "padding",
    "dilation_rate": "dilation", "rate": "rate", "synchronized": "synchronized",
}  # fmt: skip
_KERNELS = "TF_ENABLE_ONEDNN_OPTS"  # Chooses TensorFlow's kernels on CPUs; only recorded.
TRANSPOSES = {("OIHW", "HWIO"): (2, 3, 1, 0), ("OI", "IO"): (1, 0)}  # (from, to) → axes.
Path = str | os.PathLike


class Hooks(contextlib.ExitStack):
    """Replaces methods of instances, or of a class, in a `with` block."""

    def hook(self, owner: Any, name: str, wrapper: Callable) -> None:
        """Makes `owner.name(...)` call `wrapper(inner, ...)`, where `inner` is the method."""
        inner, hidden = getattr(owner, name), vars(owner).get(name)
        assign = type.__setattr__ if isinstance(owner, type) else object.__setattr__
        assign(owner, name, lambda *args, **kwargs: wrapper(inner, *args, **kwargs))
        if hidden is None:
            self.callback(vars(owner).pop, name, None)
        else:  # Another hook, which was there before, or the method of a class.
            self.callback(assign, owner, name, hidden)


class Recorder:
    """Records steps of `model.fit`, or of a custom loop, in a `with` block.

    Args:
        model: a compiled model, or with `optimizer` any model; under a strategy or not.
        optimizer: optimizer of a custom loop.
        steps: number of first steps to record, or numbers of steps, from 0; None for the first
            three, or as many as there are.
        replay: a recording whose weights and statistics are assigned before each step; from a
            recording of Keras also optimizer state (without learning rate) and seeds.
        permute: seed for a permutation of each replica's examples in these steps.
        names: name of a variable → its name in `replay`; others are matched in order, by kind and
            shape.

    Attributes:
        about: the description of the recording, complete after the block.
        arrays: `POSITION/KIND/REPLICA/INDEX` → array, after the block.

    Raises:
        ValueError: no hook can run in this training, or `replay` lacks steps or variables.
    """

    def __init__(
        self, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None, *,
        steps: int | Collection[int] | None = None,
        replay: Path | None = None, permute: int | None = None,
        names: Mapping[str, str] | None = None,
    ):  # fmt: skip
        optimizer = optimizer or getattr(model, "optimizer", None)
        if optimizer is None:
            raise ValueError(
                f"model {model.name} is not compiled; call model.compile first, or pass the"
                " optimizer of a custom loop"
            )
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ValueError(f"optimizer: {optimizer!r} is no optimizer of Keras")
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
        self.about: dict[str, Any] = {
            **FORMAT, "framework": "keras", "reduction": "sum", "order": "clip, reduce",
            "num_replicas": model.distribute_strategy.num_replicas_in_sync, "steps": [],
            "variables": [], "gradients": [],
            "permuted": permute, "replayed": os.fspath(replay) if replay else None,
            "versions": {
                **{package.__name__: package.__version__ for package in (keras, tf, np)},
                _KERNELS: os.environ.get(_KERNELS, "not set"),
            },
        }  # fmt: skip
        self.arrays: dict[str, np.ndarray] = {}
        self._model, self._outer, self._hooks = model, optimizer, Hooks()
        self._optimizer = inner_optimizer(optimizer)
        number = DEFAULT_NUM_STEPS if steps is None else steps
        self._wanted = range(number) if isinstance(number, int) else number
        self.about["asked"] = [] if steps is None else sorted(self._wanted)
        self._replay = Replay(replay, self._wanted, names or {}) if replay else None
        # Step number, kind and replica → "INDEX" or "INDEX/values", … → array.
        self._kept: dict[tuple[int, str, int], dict[str, np.ndarray]] = {}
        self._num_seen: collections.Counter[int] = collections.Counter()
        self._number: dict[int, tf.Tensor] = {}  # Step number of a replica, or -1.
        self._num_losses: dict[int, int] = {}  # Of the replicas that are in a step.
        self._has_parts = False  # Whether a step takes the gradients of several losses.
        self._frozen: list[str] = []

    def wrap(self, step: Callable) -> Callable:
        """Returns a custom loop's replica step with hooks; its arguments are the batch."""
        if self._model.built and not self._optimizer.built:
            with self._model.distribute_strategy.scope():
                self._optimizer.build(self._model.trainable_variables)
        return partial(self._step, step)

    def _build(self, data: Sequence[Any]) -> None:
        """Creates the variables of a custom loop whose model is called for the first time."""
        batch = data[0] if len(data) == 1 else data
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)

        def zeros(leaf: tf.Tensor) -> tf.Tensor:
            return tf.zeros((1, *leaf.shape[1:]), leaf.dtype)

        def build(strategy: tf.distribute.Strategy) -> None:
            with tf.init_scope():
                if not self._model.built:
                    self._model(tree.map_structure(zeros, x))
                self._optimizer.build(self._model.trainable_variables)

        tf.distribute.get_replica_context().merge_call(build)

    def save(self, path: Path) -> None:
        """Writes a file when it is complete; process 0 of several processes `….rank0.npz`."""
        name, replicas = os.fspath(path), self.about["replicas"]
        if 0 < len(replicas) < self.about["num_replicas"]:
            name = f"{name.removesuffix('.npz')}.rank{replicas[0] // len(replicas)}.npz"
        firsts: dict[int, str] = {}  # Of arrays that are kept by several names.
        first_of = {key: firsts.setdefault(id(x), key) for key, x in self.arrays.items()}
        aliases = {key: first for key, first in first_of.items() if key != first}
        about = json.dumps({**self.about, "aliases": aliases}, default=str)
        members: dict[str, Any] = {"about": np.array(about)}
        members |= {key: self.arrays[key] for key in firsts.values()}
        with open(f"{name}.tmp", "wb") as file:
            np.savez(file, **members)
            file.flush()
            os.fsync(file.fileno())  # A power cut leaves the whole file, or none.
        os.replace(f"{name}.tmp", name)

    def __enter__(self) -> "Recorder":
        model, optimizer, hook = self._model, self._optimizer, self._hooks.hook
        hook(model, "train_step", self._step)
        hook(model, "compute_loss", self._compute_loss)
        hook(optimizer, "_backend_apply_gradients", self._apply_gradients)
        hook(optimizer, "_clip_gradients", self._clip_gradients)
        hook(optimizer, "_all_reduce_sum_gradients", self._all_reduce)
        hook(tf.GradientTape, "gradient", self._gradient)
        model.train_function = None  # One that is traced already has no hooks.
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._hooks.close()
        self._model.train_function = None
        # A step that an error has ended is omitted.
        steps = sorted({number for number, kind, _ in self._kept if kind == "after"})
        rates: dict[int, float] = {}
        for (number, kind, replica), arrays in sorted(self._kept.items()):
            if kind == "learning_rate":
                rates.setdefault(number, float(arrays["0"]))
            elif number in steps and not (kind == "objective" and self._has_parts):
                place = f"{steps.index(number) + 1}/{kind}/{replica}"
                self.arrays |= {f"{place}/{index}": array for index, array in arrays.items()}
        self._share_replaced()
        optimizer = {"class": type(self._optimizer).__name__, "framework": "keras"}
        self.about |= {
            "steps": steps,
            "ended_with": in_words(error),
            "replicas": sorted({replica for _, _, replica in self._kept}),
            "in_evaluation": [self._frozen] * len(steps),
            "settings": [settings_of(self._model, self._optimizer, rates[n]) for n in steps],
            "optimizer": optimizer | constants_of(self._optimizer),
        }
        if self._replay and self._replay.error:  # Without the notes of a traced function.
            raise ValueError(self._replay.error) from None

    def _share_replaced(self) -> None:
        """Keeps once what a step has left and the next one finds before its state is replaced."""
        for name in [name for name in self.arrays if "/replaced/" in name]:
            position, _, place = name.split("/", 2)
            after = self.arrays.get(f"{int(position) - 1}/after/{place}")
            if after is not None and after.tobytes() == self.arrays[name].tobytes():
                self.arrays[name] = after

    def _begin(self, replica: int, data: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the number of the step that a replica begins, -1 if it is not recorded."""

        def begin(*sizes: np.ndarray) -> np.int64:
            number = self._num_seen[replica]
            self._num_seen[replica] += 1
            return np.int64(number if number in self._wanted else -1)

        # At the end of the data, a step begins in vain: it must not be counted.
        return tf.numpy_function(begin, [tf.size(leaf) for leaf in data[:1]], tf.int64)

    def _keep(self, kind: str, values: Sequence[Any]) -> None:
        """Copies tensors and variables of this replica, if its step is recorded."""
        replica, parts = replica_id(), dict[str, Any]()
        if (number := self._number.get(replica)) is None:
            raise ValueError("a step is not recorded; call strategy.run(recorder.wrap(step), …)")
        for index, value in enumerate(values):
            if isinstance(value, tf.IndexedSlices):
                parts |= {f"{index}/values": value.values, f"{index}/indices": value.indices}
                parts[f"{index}/rows"] = value.dense_shape[0]
            else:
                parts[f"{index}"] = value

        def keep(number: np.int64, *arrays: np.ndarray) -> np.int64:
            copies = map(plain_copy, arrays)  # Buffers are reused.
            self._kept[int(number), kind, replica] = dict(zip(parts, copies, strict=True))
            return number

        def copy() -> tf.Tensor:
            flat = [to_numpy_dtype(value) for value in parts.values()]
            return tf.numpy_function(keep, [number, *flat], tf.int64)

        tf.cond(number >= 0, copy, lambda: number)

    def _step(self, inner: Callable, *data: Any) -> Any:
        """Runs a step. AutoGraph converts this method, and so `inner`, as without a recorder."""
        data, state = self._begin_step(data)
        try:
            result = inner(*data)
        finally:
            self._end_losses()
        self._end_step(state)
        return result

    @tf.autograph.experimental.do_not_convert
    def _begin_step(self, data: Any) -> tuple[Any, list[Any]]:
        """Copies what is known before a step; returns its examples and the variables."""
        if not self._optimizer.built:
            self._build(data)
        state, replica = [*self._model.variables, *self._outer.variables], replica_id()
        self.about |= description(self._model, self._outer)
        self._number[replica] = number = self._begin(replica, leaves(data))
        if self._replay:
            self._keep("replaced", state)
            self._replay.assign(state, self.about["variables"], number, replica)
        if (seed := self.about["permuted"]) is not None:
            data = permuted(data, number, [seed, replica])
        self.about["structure"] = to_json(data[0] if len(data) == 1 else data)
        self._keep("data", leaves(data))
        self._keep("before", state)
        self._keep("learning_rate", [self._optimizer.learning_rate])
        self._frozen = [layer.name for layer in self._model._flatten_layers() if is_frozen(layer)]
        self._num_losses[replica] = 0
        return data, state

    @tf.autograph.experimental.do_not_convert
    def _end_losses(self) -> None:
        del self._num_losses[replica_id()]

    @tf.autograph.experimental.do_not_convert
    def _end_step(self, state: list[Any]) -> None:
        self._keep("after", state)

    def _compute_loss(self, inner: Callable, *args: Any, **kwargs: Any) -> tf.Tensor:
        loss = inner(*args, **kwargs)
        names = ("x", "y", "y_pred", "sample_weight", "training")
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        if call.get("training", True):
            predictions = leaves(call["y_pred"])
            self.about["predicted"] = to_json(call["y_pred"])
            self._keep("y_pred", predictions)
            masks = map(get_keras_mask, predictions)
            self._keep("mask", [tf.zeros(()) if mask is None else mask for mask in masks])
            self._keep("loss", [loss, regularisation(self._model)])
        return loss

    def _gradient(self, inner: Callable, tape: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Records the scalar whose gradient a step takes, which a loss scale would multiply."""
        weights = {id(variable.value) for variable in self._model.trainable_variables}
        given = tree.flatten((args, kwargs))
        sources = {id(x.value if isinstance(x, keras.Variable) else x) for x in given}
        replica = replica_id() if self._num_losses and weights & sources else -1
        is_plain = self._optimizer is self._outer and tf.is_tensor(target)
        if replica in self._num_losses and is_plain and target.shape.rank == 0:
            self._has_parts |= self._num_losses[replica] > 0
            self._num_losses[replica] += 1
            self._keep("objective", [target, regularisation(self._model)])
        return inner(tape, target, *args, **kwargs)

    def _apply_gradients(self, inner: Callable, gradients: Sequence, variables: Sequence) -> Any:
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        self.about["gradients"] = [getattr(v, "path", v.name) for _, v in pairs]
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
        self._arrays: dict[str, np.ndarray] = {}  # Of all processes, those before the steps.
        stem = os.fspath(path).removesuffix(".npz")
        files = glob.glob(f"{glob.escape(stem)}.rank*.npz")
        files = [os.fspath(path)] if os.path.exists(path) else files
        if not files:
            raise ValueError(f"replay={path} does not exist; pass a file that was recorded")
        for file in files:
            with np.load(file, allow_pickle=False) as members:
                self._about = json.loads(str(members["about"])) if "about" in members else {}
                if self._about | FORMAT != self._about:
                    raise ValueError(f"replay={file} is not of version 2; record it again")
                sources = {name: name for name in members.files} | self._about.get("aliases", {})
                before = {name: of for name, of in sources.items() if "/before/" in name}
                self._arrays |= {name: members[of] for name, of in before.items()}
        self._steps = self._about["steps"]
        if missing := sorted(set(wanted) - set(self._steps)):
            raise ValueError(f"replay={path} lacks steps {missing}; it has {self._steps}")

    def _before(self, step: int, replica: int) -> dict[int, np.ndarray]:
        """Returns index of a variable → array, of the copy of the weights of a replica."""
        copies = self._about.get("num_copies") or self._about["num_replicas"]
        place = f"{self._steps.index(step) + 1}/before/{replica % copies}"
        names = {i: f"{place}/{i}" for i in range(len(self._about["variables"]))}
        return {i: self._arrays[name] for i, name in names.items() if name in self._arrays}

    def assign(
        self, state: Sequence[keras.Variable], variables: Sequence[dict[str, str]],
        number: tf.Tensor, replica: int,
    ) -> None:  # fmt: skip
        """Assigns the state before a step to this replica's copies, if the step is recorded."""
        copies_of = tf.distribute.get_strategy().experimental_local_results
        found = self._matched([tuple(variable.shape) for variable in state], variables)
        copies = [copies_of(state[own].value) for own, *_ in found]

        def read(number: np.int64) -> list[np.ndarray]:
            before = self._before(int(number), replica)
            return [np.transpose(before[other], axes) for _, other, axes in found]

        def assign() -> tf.Tensor:
            first = self._before(self._steps[0], 0)
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
        others, arrays = self._about["variables"], self._before(self._steps[0], 0)
        kinds = ["weight", "statistic"]
        if self._about["framework"] == "keras":
            kinds += ["optimizer state", "seed"]
        free, found, partners = list(arrays), [], {"": ""}
        if unknown := self._names.keys() - {about["name"] for about in variables}:
            self._fail(f"names has {', '.join(sorted(unknown))}, which the model does not have")
        for own, (shape, about) in enumerate(zip(shapes, variables, strict=True)):
            if about["kind"] not in kinds or about.get("slot") == "learning_rate":
                continue
            wanted = {"kind": about["kind"], "slot": about.get("slot", "")}
            if "of" in about:
                wanted["of"] = partners[about["of"]]
            if about["name"] in self._names:
                wanted["name"] = self._names[about["name"]]
            fits = []
            for other in free:
                theirs, array = others[other], arrays[other]
                layouts = theirs.get("layout", ""), about["layout"]
                axes = TRANSPOSES.get(layouts, tuple(range(array.ndim)))
                same = all((theirs.get(key) or "") == value for key, value in wanted.items())
                if same and tuple(array.shape[axis] for axis in axes) == shape:
                    fits.append((theirs["name"] != about["name"], other, axes))
            if not fits and about["kind"] in ("optimizer state", "seed"):
                continue  # For another optimizer, or a layer that the other model lacks.
            if not fits:
                listed = [
                    f"{theirs['name']} {array.shape}"
                    for theirs, array in ((others[other], arrays[other]) for other in arrays)
                    if theirs["kind"] == about["kind"]
                ]
                self._fail(
                    f"no {about['kind']} fits {about['name']} {shape}; it has"
                    f" {', '.join(listed) or 'none'}; pass names={{{about['name']!r}: its name}}"
                )
            _, other, axes = min(fits)
            free.remove(other)
            partners[about["name"]] = others[other]["name"]
            found.append((own, other, axes))
        return found

    def _fail(self, text: str) -> None:
        self.error = f"replay={self._path}: {text}"
        raise ValueError(self.error)


def in_words(error: BaseException | None) -> str:
    """Returns the exception that ended the training in one line; "" for none and `sys.exit(0)`."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return "".join(c for c in text if c.isprintable())[:200].removesuffix(": ").removesuffix(":")


class NotRecording:
    """Stands for the recorder of a training that is not recorded."""

    def wrap(self, step: Callable) -> Callable:
        """Returns the step."""
        return step


@contextlib.contextmanager
def record(
    path: Path | None, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None, *,
    steps: int | Collection[int] | None = None, **options: Any,
) -> Iterator[Recorder | NotRecording]:  # fmt: skip
    """Records steps in a `with` block and saves them at its end, even if an error ends it.

    See `Recorder` for the arguments; `lockstep.assert_same_training` gives path, steps, replay and
    permute in place of those of the script. With path None, only its runs are recorded.
    """
    if given := json.loads(os.environ.get("LOCKSTEP_RECORD", "null")):
        path, steps = given.pop("path"), given.pop("steps")
        if given.pop("modules", False):
            raise ValueError("modules: Keras' modules cannot be recorded; leave it out")
        options |= given
    if path is None:
        yield NotRecording()
        return
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise ValueError(f"{path}: must be in a folder that exists")
    recorder = Recorder(model, optimizer, steps=steps, **options)
    try:
        with recorder:
            yield recorder
    finally:
        if recorder.arrays:
            recorder.save(path)
    if not recorder.arrays:
        raise ValueError(
            f"{path} is not written: no step was recorded; train within the block, and call"
            " tf.function there"
        )


def description(
    model: keras.Model, optimizer: keras.optimizers.Optimizer
) -> dict[str, list[dict[str, Any]] | str]:
    """Describes the variables of a model and its optimizer, and the layers."""
    layers = [part for part in model._flatten_layers(include_self=False) if not part._layers]
    layouts, data_layout = {}, ""
    for layer in layers:
        if isinstance(layer, keras.layers.Conv2D):
            data_layout = {"channels_last": "NHWC"}.get(layer.data_format, "NCHW")
        if isinstance(layer, keras.layers.Conv2D | keras.layers.Dense) and layer.built:
            layout = "IO" if len(layer.kernel.shape) == 2 else "HWIO"
            layouts[getattr(layer.kernel, "path", "")] = layout
    described = [
        {"name": layer.name, "class": type(layer).__name__}
        | {"weights": [weight.path for weight in layer.weights]}
        | {to: getattr(layer, own) for own, to in LAYER_SETTINGS.items() if hasattr(layer, own)}
        for layer in layers
    ]
    weights = [weight.path for weight in model.trainable_variables]
    variables = []
    for variable in model.variables:
        kind = "weight" if variable.path in weights else "statistic"
        kind = kind if is_float(variable) else "seed"
        layout = layouts.get(variable.path, "")
        variables.append({"name": variable.path, "kind": kind, "layout": layout})
    starts = {f"{weight.replace('/', '_')}_": weight for weight in weights}
    for variable in optimizer.variables:
        start = max(filter(variable.name.startswith, starts), key=len, default="")
        of, slot = starts.get(start, ""), variable.name.removeprefix(start)
        about = {"name": variable.path, "kind": "optimizer state", "of": of, "slot": slot}
        variables.append({**about, "layout": layouts.get(of, "")})
    return {"layers": described, "variables": variables, "data_layout": data_layout}


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


def is_frozen(layer: keras.Layer) -> bool:
    """Returns whether a BatchNorm layer normalises with its moving statistics in training, too."""
    return isinstance(layer, keras.layers.BatchNormalization) and not layer.trainable


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
