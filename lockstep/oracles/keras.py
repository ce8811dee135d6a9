"""Computes steps of a Keras model on one device, without a strategy."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lockstep.data.trace import SEED, Trace
from lockstep.numeric.arrays import EPS, UNITS, Array, Named, Rows, same_bits
from lockstep.oracles import Ask, Batch, Computed, Oracle, OtherSetting
from lockstep.oracles.keras_shards import as_replica, by_shard, separate_layers
from lockstep.recorders.common import Hooks
from lockstep.recorders.keras.optimizers import inner_optimizer
from lockstep.recorders.keras.private import (
    CLIPPING,
    clip_gradients,
    layers_in,
    layers_of,
    regularisation,
    seed_generators_of,
    set_mask,
    takes_training,
)
from lockstep.recorders.keras.values import is_float, leaves, to_numpy_dtype

_LIMITS = ("clipnorm", "global_clipnorm", "clipvalue")


class OneDevice:
    """A compiled model on one device, whose own `train_step` computes the steps.

    Args:
        model: a compiled model, created outside of any strategy's scope.
        trace: provides states and examples.
        is_float64: whether the model was built `in_float64`.

    Raises:
        ValueError: the trace is of another model.
    """

    def __init__(self, model: keras.Model, trace: Trace, is_float64: bool = False):
        if tf.distribute.has_strategy() or model.distribute_strategy.num_replicas_in_sync > 1:
            raise ValueError("build the second model outside of the strategy's scope")
        if getattr(model, "optimizer", None) is None:
            raise ValueError(f"model {model.name} is not compiled; call model.compile first")
        groups = trace.about.settings[0] if trace.about.settings else ()
        if any("optimizer" in group for group in groups):
            raise ValueError(
                "the recording has several optimizers, and a model that is compiled computes the"
                " step of one; compare it with a recording on one device"
            )
        self.model, self.trace, self._is_float64 = model, trace, is_float64
        self.optimizer = inner_optimizer(model.optimizer)
        first = trace.arrays(0, "data", 0)
        if first is None or trace.arrays(0, "before", 0) is None:
            raise ValueError(
                "the recording has no examples or no state before its first step, from which one"
                " device would compute the step; record it again"
            )
        x, _, _ = self.unpack([array[:1] for array in first])
        if not model.built or not model.variables:
            model(x)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        variables = list(model.variables)
        if len(trace.keys) > len(variables):  # Else, no step has applied an optimizer.
            variables += model.optimizer.variables
        self._check_same_model([tuple(variable.shape) for variable in variables])
        self.variables = dict(zip(trace.keys, variables, strict=True))
        self.layers = [
            each for each in layers_of(model) if not layers_in(each) or seed_generators_of(each)
        ]

    def _check_same_model(self, shapes: Sequence[tuple[int, ...]]) -> None:
        recorded = self.trace.named(0, "before", 0) or {}
        if len(shapes) != len(recorded):
            raise ValueError(
                f"the recording has {len(recorded)} variables and the model {self.model.name}"
                f" {len(shapes)}; build and compile the model that was recorded"
            )
        for own, (name, array) in zip(shapes, recorded.items(), strict=True):
            if own != array.shape:
                raise ValueError(
                    f"variable {name} has shape {array.shape} in the recording and {own} in the"
                    f" model {self.model.name}; build the model that was recorded"
                )

    def load(self, state: Named) -> None:
        """Assigns all variables."""
        for name, variable in self.variables.items():
            variable.assign(tf.cast(state[name], variable.dtype))

    def read(self) -> Named:
        """Returns all variables."""
        values = self.variables.items()
        return {name: np.array(to_numpy_dtype(variable.value)) for name, variable in values}

    def step(self, ask: Ask) -> Computed:
        """Runs the model's own `train_step` from a state, without the update."""
        y_pred: list[np.ndarray] = []
        losses: list[float] = []
        raw: Named = {}

        def compute_loss(inner: Callable, *args: Any, **kwargs: Any) -> tf.Tensor:
            loss, regular = inner(*args, **kwargs), regularisation(self.model)
            predictions = leaves(kwargs["y_pred"] if "y_pred" in kwargs else args[2])
            regular = tf.cast(regular, loss.dtype)
            y_pred[:] = [np.array(to_numpy_dtype(p)) for p in predictions]
            losses[:] = float(tf.reduce_sum(loss) - regular), float(regular)
            data_loss = loss - regular
            if ask.starts is not None:
                pairs = zip(predictions, ask.starts, strict=True)
                parts = [tf.reduce_sum(p * tf.cast(start, p.dtype)) for p, start in pairs]
                data_loss = tf.add_n([tf.cast(part, loss.dtype) for part in parts])
            return ask.scales[0] * data_loss + ask.scales[1] * regular

        def apply(inner: Callable, grads: Sequence, variables: Any = None, **kwargs: Any) -> None:
            pairs = zip(grads, variables or self.model.trainable_variables, strict=True)
            raw.update({names[id(v)]: to_numpy(g) for g, v in pairs if g is not None})

        names = {id(variable): name for name, variable in self.variables.items()}
        self.load(ask.state)
        off = in_inference_mode([self.layers[index] for index in ask.off])
        changed: list[Named] = []
        with off, Hooks() as hooks, self._precision(), as_replica(ask.replica):
            for index, dtype in ask.short:
                hooks.hook(self.layers[index], "call", functools.partial(_in_short, dtype))
            unit, seed = ask.noise
            generator = np.random.default_rng(seed)
            for layer in self.layers if unit else ():
                hooks.hook(layer, "call", functools.partial(_with_noise, generator, unit))
            if ask.parts:
                by_parts = by_shard(self.model, self.variables, ask.parts, at_once=ask.at_once)
                changed = hooks.enter_context(by_parts)
            hooks.hook(self.model, "compute_loss", compute_loss)
            hooks.hook(self.optimizer, "apply", apply)
            self.model.train_step(from_json(self.trace.about.structure, self._tensors(ask.data)))
        after, loss = self.read(), (losses[0], losses[1]) if losses else None
        return Computed(y_pred, loss, raw, after, tuple(after | each for each in changed))

    def loss(
        self, state: Named, data: Batch, predictions: list[tf.Tensor], masks: Batch, weighted: bool
    ) -> tf.Tensor:
        """Returns the loss of given predictions, without regularisation."""
        x, y, sample_weight = self.unpack(data)
        self.load(state)
        if self.model.losses:
            self.model(x, training=True)  # Activity regularisers.
        predictions = [tf.identity(prediction) for prediction in predictions]
        for prediction, mask in zip(predictions, masks, strict=True):
            if mask.ndim and weighted:
                set_mask(prediction, tf.constant(mask))
        loss = self.model.compute_loss(
            x=x,
            y=y,
            y_pred=from_json(self.trace.about.predicted, predictions),
            sample_weight=sample_weight if weighted else None,
        )
        return tf.reduce_sum(loss) - tf.cast(regularisation(self.model), loss.dtype)

    def weights_of(self, names: Sequence[str]) -> list[keras.Variable]:
        """Returns the variables of these names."""
        return [self.variables[name] for name in names]

    def unpack(self, data: Batch) -> tuple[Any, Any, Any]:
        """Returns inputs, targets and sample weights."""
        nest = from_json(self.trace.about.structure, self._tensors(data))
        return keras.utils.unpack_x_y_sample_weight(nest)

    def _tensors(self, data: Batch) -> list[tf.Tensor]:
        tensors = [tf.constant(array) for array in data]
        if not self._is_float64:
            return tensors
        return [tf.cast(t, tf.float64) if t.dtype.is_floating else t for t in tensors]

    def _precision(self) -> contextlib.AbstractContextManager:
        return in_float64() if self._is_float64 else contextlib.nullcontext()


class KerasOracle(Oracle):
    """Computes steps of the user's model on one device, in float32 and float64.

    Args:
        model: the compiled model, created outside of any strategy's scope; or a function that
            builds it, so that it can be built in float64, too.
        trace: provides states and examples.

    Raises:
        ValueError: the trace is of another model.
    """

    may_mix = True
    records_overflow = False

    def __init__(self, model: keras.Model | Callable[[], keras.Model], trace: Trace):
        is_built = isinstance(model, keras.Model)
        self._one = one = OneDevice(model if is_built else model(), trace)
        self._exact: OneDevice | None = None
        self._trace = trace
        drawn = _seeds_drawn(trace)
        self.layer_names = [layer.name for layer in one.layers]
        self.random_layers = self.layers_of(drawn)
        self.layers_with_statistics = tuple(
            index
            for index, layer in enumerate(one.layers)
            if any(is_float(variable) for variable in layer.non_trainable_variables)
        )
        self.unit = max([EPS, *(UNITS.get(layer.compute_dtype, EPS) for layer in one.layers)])
        self.units = {n: UNITS.get(v.dtype, EPS) for n, v in one.variables.items()}
        self.synchronized_layers = tuple(
            index
            for index in self.layers_with_statistics
            if len(trace.shards) > 1 and getattr(one.layers[index], "synchronized", False)
        )
        inner = {id(v) for part in separate_layers(one.model) for v in part.variables}
        self.draws_outside = any(id(one.variables[name]) not in inner for name in drawn)
        self.scales_loss = one.optimizer is not one.model.optimizer
        own = {id(variable) for variable in one.optimizer.variables}
        is_sgd = isinstance(one.optimizer, keras.optimizers.SGD)
        self.momentum = one.optimizer.momentum if is_sgd else 0.0
        self.tracks = {name for name, variable in one.variables.items() if id(variable) in own}
        self.why_not_exact = "the model is built already"
        if not is_built:
            self.why_not_exact = self._build_in_float64(model)

    def _build_in_float64(self, build: Callable[[], keras.Model]) -> str:
        """Builds the same model in float64, or returns why it cannot."""
        if self.random_layers:
            return "the model has random layers"
        if self.unit > EPS:
            return "the model does not compute in float32"
        trace = self._trace
        try:
            with in_float64():
                exact = OneDevice(build(), trace, is_float64=True)
            exact.step(Ask(trace.named(0, "before", 0) or {}, trace.arrays(0, "data", 0) or []))
        except Exception as error:  # From the user's code, which may require float32.
            return f"{type(error).__name__} in float64"
        if any(layer.weights and layer.compute_dtype != "float64" for layer in exact.layers):
            return "the model sets its own dtype"
        self._exact = exact
        return ""

    def layers_of(self, seeds: Collection[str]) -> tuple[int, ...]:
        """Returns the indices of the layers that draw from these seeds."""
        names = {id(variable): name for name, variable in self._one.variables.items()}
        return tuple(
            index
            for index, layer in enumerate(self._one.layers)
            if any(names.get(id(g.state), "") in seeds for g in seed_generators_of(layer))
        )

    def compute(self, ask: Ask, *, exactly: bool = False) -> Computed:
        """Computes a shard in float32, or in float64; see `Oracle`."""
        if not exactly:
            return self._one.step(ask)
        assert self._exact is not None
        return self._exact.step(ask)

    def compute_finely(self, ask: Ask) -> Computed | None:
        """Computes a shard with float32 layers; see `Oracle`.

        Random layers are not changed, because they would use other random numbers; neither are
        layers that contain them, such as an LSTM with dropout.
        """
        one = self._one
        random = [one.layers[index] for index in self.random_layers]

        def is_random(layer: keras.layers.Layer) -> bool:
            return any(part is each for part in layers_of(layer) for each in random)

        layers = [
            layer
            for layer in layers_of(one.model)
            if type(layer.dtype_policy) is keras.DTypePolicy
            and layer.compute_dtype != layer.variable_dtype == "float32"
            and (isinstance(layer, keras.Model) or not is_random(layer))
        ]
        policies = [layer.dtype_policy for layer in layers]
        try:
            for layer in layers:
                layer.dtype_policy = "float32"
            return one.step(ask)
        except Exception:  # From the user's code, which may require another dtype.
            return None
        finally:
            for layer, policy in zip(layers, policies, strict=True):
                layer.dtype_policy = policy

    def loss(
        self, state: Named, data: Batch, y_pred: Batch, masks: Batch, *, weighted: bool = True
    ) -> float:
        """Returns the loss of given predictions, without regularisation; see `Oracle`."""
        predictions = [tf.constant(array) for array in y_pred]
        return float(self._one.loss(state, data, predictions, masks, weighted))

    def loss_gradients(self, state: Named, data: Batch, y_pred: Batch, masks: Batch) -> Batch:
        """Returns the gradient of that loss with respect to each prediction."""
        predictions = [tf.constant(array) for array in y_pred]
        with tf.GradientTape() as tape:
            tape.watch(predictions)
            loss = self._one.loss(state, data, predictions, masks, True)
        zero = tf.UnconnectedGradients.ZERO
        return [g.numpy() for g in tape.gradient(loss, predictions, unconnected_gradients=zero)]

    def regular_gradients(self, state: Named, data: Batch) -> Named:
        """Returns the gradients of `model.losses`; empty without any."""
        one = self._one
        if not one.model.losses:
            return {}
        names = list(self._trace.about.gradients)
        one.load(state)
        with tf.GradientTape() as tape:
            one.model(one.unpack(data)[0], training=False)
            regular = regularisation(one.model)
        weights = one.weights_of(names)
        gradients = tape.gradient(regular, [weight.value for weight in weights])
        return {
            name: np.zeros(weight.shape) if g is None else to_numpy(g)
            for name, weight, g in zip(names, weights, gradients, strict=True)
        }

    def targets(self, data: Batch) -> tuple[int, list[np.ndarray]]:
        """Returns how many leaves of the examples are inputs, and the sample weights."""
        x, _, sample_weight = self._one.unpack(data)
        return len(leaves(x)), [np.asarray(weight) for weight in leaves(sample_weight)]

    def clip(self, gradients: Named) -> Named:
        """Returns gradients after the optimizer's clipping."""
        clipped = clip_gradients(self._one.optimizer, list(map(to_tf, gradients.values())))
        return dict(zip(gradients, map(to_numpy, clipped), strict=True))

    def limits(self) -> str:
        """Returns the thresholds of the optimizer's clipping in words; "" without clipping."""
        values = {name: getattr(self._one.optimizer, name, None) for name in _LIMITS}
        return ", ".join(f"{name}={value:g}" for name, value in values.items() if value)

    def settings(self) -> Iterator[OtherSetting]:
        """Yields the other form of momentum; see `Oracle`."""
        if self.momentum:
            is_ahead = self._one.optimizer.nesterov
            form = "without" if is_ahead else "with"
            text = f"the change is that of momentum {form} the look-ahead of Nesterov"
            yield "other_nesterov", text, {"nesterov": not is_ahead}

    def update(
        self, before: Named, sums: Named, *, clips: bool = False, rate: float = 1.0,
        decays: bool = True, **settings: Any,
    ) -> Named:  # fmt: skip
        """Returns all variables after the optimizer's update; see `Oracle`."""
        one, optimizer = self._one, self._one.optimizer
        one.load(before)
        with Hooks() as hooks:
            for name, value in settings.items():
                hooks.callback(setattr, optimizer, name, getattr(optimizer, name))
                setattr(optimizer, name, value)
            if not clips:
                hooks.hook(optimizer, CLIPPING, lambda inner, grads: grads)
            if rate != 1.0 and decays:
                name = "_get_current_learning_rate"
                hooks.hook(optimizer, name, lambda inner: rate * inner())
            elif rate != 1.0:
                name = "_backend_update_step"
                hooks.hook(optimizer, name, lambda inner, g, v, own: inner(g, v, rate * own))
            optimizer.apply(list(map(to_tf, sums.values())), one.weights_of(list(sums)))
        return one.read()


def _in_short(dtype: str, inner: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer and rounds its outputs; their gradients are rounded on the way back."""

    def rounded(output: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.cast(output, dtype), output.dtype) if is_float(output) else output

    return keras.tree.map_structure(rounded, inner(*args, **kwargs))


def _with_noise(
    generator: np.random.Generator, unit: float, inner: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Calls a layer and changes each number that it returns by a relative unit, up or down."""

    def changed(output: tf.Tensor) -> tf.Tensor:
        if not is_float(output):
            return output
        signs = 2 * generator.integers(0, 2, output.shape) - 1
        return output * tf.constant(1 + unit * signs, output.dtype)

    return keras.tree.map_structure(changed, inner(*args, **kwargs))


def _seeds_drawn(trace: Trace) -> set[str]:
    """Returns the names of the seeds that a step uses."""
    seeds = [name for name, kind in trace.kinds.items() if kind == SEED]
    drawn: set[str] = set()
    for position in range(len(trace.steps) if seeds else 0):
        before, after = (trace.named(position, kind, 0) or {} for kind in ("before", "after"))
        drawn |= {name for name in seeds if not same_bits(before[name], after[name])}
    return drawn


def in_float64() -> contextlib.AbstractContextManager:
    """Makes Keras build and run models in float64 in a `with` block."""
    return in_dtype("float64", "float64")


@contextlib.contextmanager
def in_dtype(dtype: str, policy_name: str) -> Iterator[None]:
    """Makes Keras build and run models in a dtype, with a dtype policy, in a `with` block."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(policy_name)
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


@contextlib.contextmanager
def in_inference_mode(layers: Sequence[keras.layers.Layer]) -> Iterator[None]:
    """Makes layers compute as in inference in a `with` block."""

    def call(inner: Callable, *args: Any, **kwargs: Any) -> Any:
        return inner(*args, **{**kwargs, "training": False})

    with Hooks() as hooks:
        for layer in layers:
            if takes_training(layer):
                hooks.hook(layer, "call", call)
        yield


def from_json(description: Any, values: Sequence[Any]) -> Any:
    """Returns the nest that `to_json` describes, with these leaves."""
    if isinstance(description, dict):
        ((kind, content),) = description.items()
        if kind == "dict":
            return {key: from_json(value, values) for key, value in content.items()}
        built = [from_json(value, values) for value in content]
        return built if kind == "list" else tuple(built)
    return None if description is None else values[description]


def to_tf(gradient: Array) -> Any:
    """Returns a recorded gradient as a tensor."""
    if not isinstance(gradient, Rows):
        return tf.constant(gradient)
    shape = (int(gradient.rows), *gradient.values.shape[1:])
    return tf.IndexedSlices(tf.constant(gradient.values), tf.constant(gradient.indices), shape)


def to_numpy(gradient: Any) -> Array:
    """Returns a gradient in the recorded form."""
    if not isinstance(gradient, tf.IndexedSlices):
        return np.array(to_numpy_dtype(gradient))
    values, indices = np.array(to_numpy_dtype(gradient.values)), gradient.indices.numpy()
    return Rows(values, indices, int(gradient.dense_shape[0]))
