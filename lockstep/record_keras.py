"""Records each replica's results in some training steps of Keras, in a file of plain arrays.

This file is standalone: copy it beside your script, or `from lockstep import record_keras`. It
needs TensorFlow, Keras 3 and NumPy.

    with record_keras.record("two.npz", model, steps=[0, 1, 2]):
        model.fit(dataset)  # The model is compiled under `strategy.scope()`.

A custom loop passes its optimizer, or a list of all, and wraps the function of a replica:

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

The hooks replace methods of the model and of the classes of optimizers, and
`GradientTape.gradient`, until the end of the block. Each optimizer that a step applies is recorded.
Recording does not change the training bitwise; other steps are not copied.

XLA does not run the hooks: `jit_compile=True` may stand on a function that the step calls, but not
around the step.
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

if tuple(map(int, keras.__version__.split(".")[:2])) < (3, 6):
    raise ImportError(f"record_keras needs Keras 3.6 or newer, and this is {keras.__version__}")
if keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"record_keras records Keras on TensorFlow, and the backend is {keras.backend.backend()};"
        " set KERAS_BACKEND=tensorflow, or record a loop of your own with record_jax or"
        " record_torch"
    )

import tensorflow as tf
from keras import tree
from keras.src.backend import get_keras_mask  # Masks have no public access.
from tensorflow.python.ops import control_flow_util  # Says whether XLA compiles a function.

FORMAT: dict[str, Any] = {"format": "lockstep trace", "version": 2}
DEFAULT_NUM_STEPS = 3  # A shorter training has recorded all that was asked for.
LAYER_SETTINGS = {  # Attribute → key.
    "epsilon": "epsilon", "momentum": "momentum", "strides": "strides", "padding": "padding",
    "dilation_rate": "dilation", "rate": "rate", "synchronized": "synchronized",
}  # fmt: skip
_KERNELS = "TF_ENABLE_ONEDNN_OPTS"  # Chooses TensorFlow's kernels on CPUs; only recorded.
# What a compiled function may compute: a recording without it can be compared.
OF_FORWARD_PASS = ("y_pred", "mask", "loss", "objective")
GRADIENTS = ("raw", "clipped", "sums")
# The base class, and the wrappers, which have methods of their own; older versions lack the last.
_WRAPPERS = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
OPTIMIZERS = tuple(
    getattr(keras.optimizers, name) for name in _WRAPPERS if hasattr(keras.optimizers, name)
)
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
            self.callback(delattr, owner, name)
        else:  # Another hook, which was there before, or the method of a class.
            self.callback(assign, owner, name, hidden)


class Recorder:
    """Records steps of `model.fit`, or of a custom loop, in a `with` block.

    Args:
        model: a compiled model, or with `optimizer` any model; under a strategy or not. A loop that
            trains several models passes a list of them.
        optimizer: optimizer of a custom loop, or a list of several.
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
        self, model: keras.Model | Sequence[keras.Model],
        optimizer: keras.optimizers.Optimizer | Sequence[keras.optimizers.Optimizer] | None = None,
        *, steps: int | Collection[int] | None = None,
        replay: Path | None = None, permute: int | None = None,
        names: Mapping[str, str] | None = None,
    ):  # fmt: skip
        model = model if isinstance(model, keras.Model) else Models(model)
        compiled = getattr(model, "optimizer", None)
        if optimizer is None and compiled is None:
            raise ValueError(
                f"model {model.name} is not compiled; call model.compile first, or pass the"
                " optimizer of a custom loop"
            )
        given: list[Any] = [optimizer or compiled]
        if isinstance(optimizer, list | tuple):
            given = [*optimizer]
        for each in given:
            if not isinstance(each, keras.optimizers.Optimizer):
                raise ValueError(f"optimizer: {each!r} is no optimizer of Keras")
        if model.compiled and model.jit_compile is True:
            raise ValueError(
                f"model {model.name} is compiled with jit_compile=True, and XLA does not run the"
                " hooks; compile it with jit_compile=False to record it"
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
        self._model, self._hooks, self._error = model, Hooks(), ""
        self._given, self._compiled = given, compiled
        # Those that a step applies, in their order: others have no part in the training.
        self._optimizers: list[keras.optimizers.Optimizer] = []
        self._num_states: dict[int, int] = {}  # Of a replica in a step: what is copied of `_state`.
        self._applied: dict[int, dict[str, Any]] = {}  # Of a replica: weight → its gradient.
        self._weights_of: dict[int, list[str]] = {}  # By the identity of an optimizer.
        self._places: dict[int, list[int]] = {}  # Of a replica: indices of its gradients.
        self._repeated: set[str] = set()  # Weights to which a step applies several gradients.
        number = DEFAULT_NUM_STEPS if steps is None else steps
        self._wanted = range(number) if isinstance(number, int) else number
        self.about["asked"] = [] if steps is None else sorted(self._wanted)
        self._replay = Replay(replay, self._wanted, names or {}) if replay else None
        # Step number, kind and replica → "INDEX" or "INDEX/values", … → array.
        self._kept: dict[tuple[int, str, int], dict[str, np.ndarray]] = {}
        self._num_seen: collections.Counter[int] = collections.Counter()
        self._number: dict[int, tf.Tensor] = {}  # Step number of a replica, or -1.
        self._num_losses: dict[int, int] = {}  # Of the replicas that are in a step.
        self._scaled: set[int] = set()  # Replicas whose loss an optimizer scales.
        self._has_parts = False  # Whether a step takes the gradients of several losses.
        self._frozen: list[str] = []

    def wrap(self, step: Callable) -> Callable:
        """Returns a custom loop's replica step with hooks; its arguments are the batch."""
        return partial(self._step, step)

    def _fail(self, text: str) -> None:
        self._error = text  # Raised at the end of the block, without the notes of tf.function.
        raise ValueError(text)

    def _build_model(self, data: Sequence[Any]) -> None:
        """Creates the variables of a model that is called for the first time."""
        unbuilt = [layer for layer in self._model._flatten_layers() if not layer.built]
        if type(self._model).call is keras.Model.call:  # Only its parts are called.
            if parts := [layer.name for layer in unbuilt if layer is not self._model]:
                self._fail(f"{parts[0]} has no weights yet; call model.build(input_shape) before")
            return
        batch = data[0] if len(data) == 1 else data
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)

        def zeros(leaf: tf.Tensor) -> tf.Tensor:
            return tf.zeros((1, *leaf.shape[1:]), leaf.dtype)

        def build(strategy: tf.distribute.Strategy) -> None:
            with tf.init_scope():
                if not self._model.built:
                    self._model(tree.map_structure(zeros, x))

        tf.distribute.get_replica_context().merge_call(build)

    def _build(self, optimizer: keras.optimizers.Optimizer, weights: Sequence[Any]) -> None:
        """Creates the variables of an optimizer outside of the traced function."""

        def build(strategy: tf.distribute.Strategy) -> None:
            with tf.init_scope(), keras.name_scope(optimizer.name, caller=optimizer):
                if not optimizer.built:
                    optimizer.build(weights)

        tf.distribute.get_replica_context().merge_call(build)

    def _add_known_optimizers(self) -> None:
        """Adds the optimizers that a step is known to apply before it does."""
        is_compiled = len(self._given) == 1 and self._given[0] is self._compiled
        is_compiled &= type(self._model).train_step is keras.Model.train_step
        for each in self._given:
            # A loss is scaled before the gradients are applied, by a variable.
            if not each.built and len(self._given) == 1 and (is_compiled or scales_loss(each)):
                self._build(each, self._model.trainable_variables)
            # A model with a step of its own may have others than the compiled one.
            is_known = is_compiled or each is not self._compiled
            if each.built and is_known and not any(each is other for other in self._optimizers):
                self._add(each)

    def _add(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._optimizers.append(optimizer)
        for part in parts_of(optimizer):
            # Of the instance: a subclass may have methods of its own.
            apply = partial(self._apply_gradients, part)
            self._hooks.hook(part, "_backend_apply_gradients", apply)
            self._hooks.hook(part, "_clip_gradients", self._clip_gradients)
            self._hooks.hook(part, "_all_reduce_sum_gradients", self._all_reduce)

    @property
    def _state(self) -> list[list[Any]]:
        """Variables of the model, and of each optimizer."""
        return [self._model.variables, *(each.variables for each in self._optimizers)]

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
        model, hook, tape = self._model, self._hooks.hook, tf.GradientTape
        hook(model, "train_step", self._step)
        hook(model, "compute_loss", self._compute_loss)
        for own in OPTIMIZERS:
            hook(own, "apply", self._apply)
            hook(own, "scale_loss", self._scale_loss)
        hook(tape, "gradient", self._gradient)
        model.train_function = None  # One that is traced already has no hooks.
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._hooks.close()
        self._model.train_function = None
        # A step that an error has ended is omitted.
        steps = sorted({number for number, kind, _ in self._kept if kind == "after"})
        rates = collections.defaultdict[int, dict[str, float]](dict)
        for (number, kind, replica), arrays in sorted(self._kept.items()):
            if kind == "learning_rate":
                for index, array in arrays.items():
                    rates[number].setdefault(index, float(array))
            elif number in steps and not (kind == "objective" and self._has_parts):
                place = f"{steps.index(number) + 1}/{kind}/{replica}"
                omitted = self._repeated_indices() if kind in GRADIENTS else ()
                self.arrays |= {
                    f"{place}/{index}": array
                    for index, array in arrays.items()
                    if index.split("/")[0] not in omitted
                }
        self._share_replaced()
        if self._optimizers:
            self.about |= self._description()
        parts = self._parts or [inner_optimizer(each) for each in self._given[:1]]
        optimizer = {"class": type(parts[0]).__name__, "framework": "keras"}
        self.about |= {
            "steps": steps,
            "ended_with": in_words(error),
            "replicas": sorted({replica for _, _, replica in self._kept}),
            "in_evaluation": [self._frozen] * len(steps),
            "settings": [self._settings(rates[number]) for number in steps],
            "optimizer": optimizer | constants_of(parts[0]),
            "computed_in": computed_in(self._model),
        }
        replay_error = self._replay.error if self._replay else ""
        if text := self._error or replay_error:  # Without the notes of a traced function.
            raise ValueError(text) from None

    @property
    def _parts(self) -> list[keras.optimizers.Optimizer]:
        """The optimizers that update weights: those in a wrapper, not the wrapper."""
        return [part for each in self._optimizers for part in parts_of(each)]

    def _owners(self) -> dict[str, list[str]] | None:
        """Returns names of optimizers → weights that they update; None for a single optimizer."""
        parts = self._parts
        return {part.name: self._updated_by(part) for part in parts} if len(parts) > 1 else None

    def _updated_by(self, part: keras.optimizers.Optimizer) -> list[str]:
        """Returns the weights that an optimizer updates; all that it has before its first step."""
        weights = [weight.path for weight in part._trainable_variables]
        own = self._weights_of.get(id(part), weights)
        return [path for path in weights if path in own]

    def _description(self) -> dict[str, Any]:
        return description(self._model, self._optimizers, self._owners())

    def _settings(self, rates: Mapping[str, float]) -> list[dict[str, Any]]:
        """Returns groups of weights with the settings of their optimizer in a step."""
        groups, parts = [], self._parts
        for index, part in enumerate(parts):
            weights = list(part._trainable_variables)
            if len(parts) > 1:
                own = self._updated_by(part)
                weights = [weight for weight in weights if weight.path in own]
            found = settings_of(part, weights, rates.get(str(index)))
            kind = {"optimizer": type(part).__name__} if len(parts) > 1 else {}
            groups += [group | kind for group in found]
        return groups

    def _repeated_indices(self) -> list[str]:
        """Returns the indices of gradients to whose weights a step applies several."""
        names = enumerate(self.about["gradients"])
        return [str(index) for index, name in names if name in self._repeated]

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

    def _keep(self, kind: str, values: Sequence[Any], places: Sequence[int] | None = None) -> None:
        """Copies tensors and variables of this replica, if its step is recorded.

        `places` are their indices, from 0 if it is None.
        """
        replica, parts = replica_id(), dict[str, Any]()
        if (number := self._number.get(replica)) is None:
            raise ValueError("a step is not recorded; call strategy.run(recorder.wrap(step), …)")
        if is_in_xla():
            if kind in OF_FORWARD_PASS:
                return
            self._fail(
                "jit_compile=True is around a recorded step, and XLA does not run the hooks; put it"
                " on a function that the step calls for the gradients, or leave it out to record"
            )
        for index, value in zip(places or range(len(values)), values, strict=True):
            if isinstance(value, tf.IndexedSlices):
                parts |= {f"{index}/values": value.values, f"{index}/indices": value.indices}
                parts[f"{index}/rows"] = value.dense_shape[0]
            else:
                parts[f"{index}"] = value

        def keep(number: np.int64, *arrays: np.ndarray) -> np.int64:
            copies = map(plain_copy, arrays)  # Buffers are reused.
            kept = self._kept.setdefault((int(number), kind, replica), {})
            kept |= zip(parts, copies, strict=True)
            return number

        def copy() -> tf.Tensor:
            flat = [to_numpy_dtype(value) for value in parts.values()]
            return tf.numpy_function(keep, [number, *flat], tf.int64)

        tf.cond(number >= 0, copy, lambda: number)

    def _step(self, inner: Callable, *data: Any) -> Any:
        """Runs a step. AutoGraph converts this method, and so `inner`, as without a recorder."""
        data = self._begin_step(data)
        try:
            result = inner(*data)
        finally:
            self._end_losses()
        self._end_step()
        return result

    @tf.autograph.experimental.do_not_convert
    def _begin_step(self, data: Any) -> Any:
        """Copies what is known before a step; returns its examples."""
        if not self._model.built:
            self._build_model(data)
        self._add_known_optimizers()
        replica = replica_id()
        self._applied[replica], self._num_states[replica] = {}, 0
        self._scaled.discard(replica)
        self._number[replica] = number = self._begin(replica, leaves(data))
        self._keep_state(replica)
        if (seed := self.about["permuted"]) is not None:
            data = permuted(data, number, [seed, replica])
        self.about["structure"] = to_json(data[0] if len(data) == 1 else data)
        self._keep("data", leaves(data))
        self._frozen = [layer.name for layer in self._model._flatten_layers() if is_frozen(layer)]
        self._num_losses[replica] = 0
        return data

    def _keep_state(self, replica: int) -> None:
        """Copies the state before a step, as far as it is known and not copied yet."""
        states, kept = self._state, self._num_states[replica]
        if kept == len(states):
            return
        first, state = sum(map(len, states[:kept])), [v for own in states for v in own]
        places = range(first, len(state))
        self.about |= self._description()
        if self._replay:
            self._keep("replaced", state[first:], places)
            number, variables = self._number[replica], self.about["variables"]
            self._replay.assign(state, variables, number, replica, first)
        self._keep("before", state[first:], places)
        old = sum(len(parts_of(each)) for each in self._optimizers[: max(kept - 1, 0)])
        new = self._parts[old:]
        self._keep("learning_rate", [p.learning_rate for p in new], range(old, old + len(new)))
        self._num_states[replica] = len(states)

    @tf.autograph.experimental.do_not_convert
    def _end_losses(self) -> None:
        del self._num_losses[replica_id()]

    @tf.autograph.experimental.do_not_convert
    def _end_step(self) -> None:
        self._keep("after", [variable for own in self._state for variable in own])
        del self._number[replica_id()]

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
        is_plain = replica not in self._scaled and tf.is_tensor(target)
        if replica in self._num_losses and is_plain and target.shape.rank == 0:
            self._has_parts |= self._num_losses[replica] > 0
            self._num_losses[replica] += 1
            self._keep("objective", [target, regularisation(self._model)])
        return inner(tape, target, *args, **kwargs)

    def _scale_loss(self, inner: Callable, optimizer: Any, loss: Any) -> Any:
        scaled = inner(optimizer, loss)
        if scaled is not loss and tf.distribute.get_replica_context():
            self._scaled.add(replica_id())
        return scaled

    @tf.autograph.experimental.do_not_convert
    def _apply(
        self, inner: Callable, optimizer: Any, gradients: Any, weights: Any = None,
        trainable_variables: Any = None,
    ) -> Any:  # fmt: skip
        """Copies the state of an optimizer before its first update in a step."""
        weights = trainable_variables if weights is None else weights
        weights = weights if weights is None else list(weights)
        replica = replica_id() if tf.distribute.get_replica_context() else -1
        if replica not in self._num_losses and self._updates_model(weights or ()):
            raise ValueError("a step is not recorded; call strategy.run(recorder.wrap(step), …)")
        if replica in self._num_losses:
            known = [*self._optimizers, *self._parts]
            if not any(optimizer is each for each in known):
                if is_in_branch():
                    self._fail(
                        f"the optimizer {optimizer.name} is applied in a condition or a loop; pass"
                        " it, or the list of all, and call its build(weights) before the block"
                    )
                if not optimizer.built and weights is not None:
                    self._build(optimizer, weights)
                if not any(optimizer is each for each in self._optimizers):
                    self._add(optimizer)
            self._keep_state(replica)
        return inner(optimizer, gradients, weights)

    def _updates_model(self, weights: Sequence[Any]) -> bool:
        own = {id(tensor_of(variable)) for variable in self._model.variables}
        return any(id(tensor_of(weight)) in own for weight in weights)

    def _apply_gradients(
        self, optimizer: Any, inner: Callable, gradients: Sequence, variables: Sequence
    ) -> Any:
        names = {id(tensor_of(v)): v.path for v in self._model.variables}
        found = [names.get(id(tensor_of(v)), "") for v in variables]
        if not any(found) and replica_id() not in self._number:
            return inner(gradients, variables)  # It trains another model.
        if "" in found:
            own = variables[found.index("")]
            self._fail(
                f"a step updates {getattr(own, 'path', own.name)}, which {self._model.name} does"
                " not have; pass a list of all models that it trains"
            )
        of_optimizer = self._weights_of.setdefault(id(optimizer), [])
        known, replica = self.about["gradients"], replica_id()
        applied = self._applied.setdefault(replica, {})
        for name, gradient in zip(found, gradients, strict=True):
            if name not in known:
                known.append(name)
            if name not in of_optimizer:
                of_optimizer.append(name)
            if applied.setdefault(name, gradient) is not gradient:
                self._repeated.add(name)
        self._places[replica] = [known.index(name) for name in found]
        self._keep("raw", gradients, self._places[replica])
        return inner(gradients, variables)

    def _clip_gradients(self, inner: Callable, gradients: Sequence) -> Any:
        clipped = inner(gradients)
        if (replica := replica_id()) in self._number:
            self._keep("clipped", clipped, self._places[replica])
        return clipped

    def _all_reduce(self, inner: Callable, pairs: Sequence) -> Any:
        reduced = list(inner(pairs))
        if (replica := replica_id()) in self._number:
            self._keep("sums", [gradient for gradient, _ in reduced], self._places[replica])
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
        number: tf.Tensor, replica: int, first: int = 0,
    ) -> None:  # fmt: skip
        """Assigns the state before a step to this replica's copies, if the step is recorded.

        Leaves out the variables before the index `first`.
        """
        copies_of = tf.distribute.get_strategy().experimental_local_results
        found = self._matched([tuple(variable.shape) for variable in state], variables)
        found = [each for each in found if each[0] >= first]
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
    path: Path | None, model: keras.Model | Sequence[keras.Model],
    optimizer: keras.optimizers.Optimizer | Sequence[keras.optimizers.Optimizer] | None = None, *,
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


class Models(keras.Model):
    """Has the variables of several models."""

    def __init__(self, models: Sequence[keras.Model]):
        super().__init__(name="_and_".join(model.name for model in models))
        self.models = list(models)
        self._distribute_strategy = models[0].distribute_strategy
        paths = [variable.path for variable in self.variables]
        if repeated := [path for path in paths if paths.count(path) > 1]:
            raise ValueError(f"several models have {repeated[0]}; give their layers other names")


def description(
    model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer],
    owners: Mapping[str, Collection[str]] | None = None,
) -> dict[str, list[dict[str, Any]] | str]:  # fmt: skip
    """Describes the variables of a model and its optimizers, and the layers.

    `owners` has, for each of several optimizers, its name and the weights that it updates.
    """
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
    parts = [part for each in optimizers for part in parts_of(each)]
    updated = {weight.path for part in parts for weight in part._trainable_variables}
    weights = updated | {weight.path for weight in model.trainable_variables}
    variables = []
    for variable in model.variables:
        kind = "weight" if variable.path in weights else "statistic"
        kind = kind if is_float(variable) else "seed"
        layout = layouts.get(variable.path, "")
        variables.append({"name": variable.path, "kind": kind, "layout": layout})
    starts = {f"{weight.replace('/', '_')}_": weight for weight in weights}
    for variable in [variable for each in optimizers for variable in each.variables]:
        start = max(filter(variable.name.startswith, starts), key=len, default="")
        of, slot = starts.get(start, ""), variable.name.removeprefix(start)
        owner = variable.path.split("/")[0]
        if owners and of and of not in owners.get(owner, [of]):
            of, slot = "", variable.path  # Another optimizer updates the weight.
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
    optimizer: keras.optimizers.Optimizer, weights: Sequence[Any], learning_rate: float | None
) -> list[dict[str, Any]]:
    """Returns groups of weights with the optimizer's settings for them in a step."""
    groups: dict[float, list[str]] = {}  # By weight decay, from which weights can be excluded.
    for weight in weights:
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
    return optimizer.inner_optimizer if scales_loss(optimizer) else optimizer


def scales_loss(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer scales the loss by a variable."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def parts_of(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that update weights, in place of a wrapper of them."""
    if isinstance(optimizer, OPTIMIZERS[2:]):
        return [part for part in optimizer.optimizers if part.built]
    return [inner_optimizer(optimizer)]


def computed_in(model: keras.Model) -> str:
    """Returns the 16-bit dtype in which layers with weights compute, or ""."""
    dtypes = {layer.compute_dtype for layer in model._flatten_layers() if layer.weights}
    return next((dtype for dtype in ("float16", "bfloat16") if dtype in dtypes), "")


def tensor_of(variable: Any) -> Any:
    """Returns the variable of TensorFlow."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def is_in_xla() -> bool:
    """Returns whether XLA compiles the function that is traced."""
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def is_in_branch() -> bool:
    """Returns whether a branch of a condition, or the body of a loop, is traced."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if type(graph).__name__ in ("CondBranchFuncGraph", "WhileBodyFuncGraph"):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def replica_id() -> int:
    """Returns the number of this replica."""
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))
