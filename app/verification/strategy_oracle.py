"""Computes the steps of our own trainings on one device, without a strategy.

Shares no code with the strategies, not even the scaling of the loss, so that it is an independent
reference.
"""

import concurrent.futures
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from app.training.training_spec import TrainingSpec
from app.verification.split_layers import Forward, without_backward_sums
from lockstep.arithmetic import EPS, UNITS, are_finite, rows_of
from lockstep.oracles import Ask, Batch, Computed, Oracle
from lockstep.oracles.keras import (
    changed_optimizer,
    in_dtype,
    in_inference_mode,
    limits_of,
    to_numpy,
    to_tf,
)
from lockstep.trace import About, Named
from strategies.copies import optimizer_names
from strategies.tf_private import flatten_layers

LOSS_SCALE = "optimizer/loss_scale"  # The optimizer's variable, with gradients in float16.


class CompiledStep:
    """A model whose training step, without the update, is a compiled function of its state.

    Args:
        model_fn: builds the model.
        dtype: "float64" or "float32", dtype of every variable.
        precision: Keras' dtype policy of the layers.
        label_smoothing: fraction of the target that is spread evenly over all classes.
        scales_loss: whether the backward pass starts from the loss scale.
        mean_of_squares: compute BatchNorm's variance as the mean of squares minus the square of the
            mean, as Keras does over devices, with larger rounding errors.
    """

    def __init__(
        self, model_fn: Callable[[], keras.Model], dtype: str, precision: str, *,
        label_smoothing: float, scales_loss: bool, mean_of_squares: bool = False,
    ):  # fmt: skip
        self._dtype, self._label_smoothing = dtype, label_smoothing
        self._scales_loss = scales_loss and dtype == "float32"
        with in_dtype(dtype, precision):
            self.model = model_fn()
        self.layers = [layer for layer in flatten_layers(self.model) if not layer._layers]
        for layer in self.layers:
            if mean_of_squares and isinstance(layer, keras.layers.BatchNormalization):
                layer.synchronized = True
        self._weights = [variable.path for variable in self.model.trainable_variables]
        self._statistics = [variable.path for variable in self.model.non_trainable_variables]
        self._functions: dict[tuple[tuple[int, ...], bool], Callable] = {}

    def run(self, ask: Ask, divisor: int) -> Computed:
        """Computes a step whose loss is the sum of the examples' losses over a divisor."""
        scale = ask.state[LOSS_SCALE] if self._scales_loss else 1.0
        numbers = (divisor, ask.scales[0] * scale, scale)
        images, labels = ask.data
        logits, loss, gradients, left = self._function(ask.off, ask.starts is not None)(
            self._values(ask.state, self._weights),
            self._values(ask.state, self._statistics),
            tf.constant(images),
            tf.constant(labels, tf.int32),
            *(tf.constant(number, self._dtype) for number in numbers),
            *(tf.constant(start, self._dtype) for start in ask.starts or ()),
        )
        raw = dict(zip(self._weights, (g.numpy() for g in gradients), strict=True))
        statistics = dict(zip(self._statistics, (s.numpy() for s in left), strict=True))
        return Computed([to_numpy(logits)], (loss.numpy(), 0.0), raw, {**ask.state, **statistics})

    def run_eagerly(self, ask: Ask, forward: Forward) -> Named:
        """Returns the gradients of a step with another forward pass."""
        for variable in self.model.variables:
            variable.assign(ask.state[variable.path])
        images, labels = (tf.constant(array) for array in ask.data)
        with tf.GradientTape() as tape:
            loss = self.loss(forward(self.model, images), labels) * ask.scales[0] / len(labels)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        return dict(zip(self._weights, (g.numpy() for g in gradients), strict=True))

    def loss(self, logits: tf.Tensor, labels: tf.Tensor, dtype: str = "") -> tf.Tensor:
        """Returns the sum of the losses, in the order of operations of a training step.

        Another order is equally exact, but results would not be bitwise equal.
        """
        logits = tf.cast(logits, dtype or self._dtype)
        loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        if smoothing := self._label_smoothing:
            evenly = tf.reduce_logsumexp(logits, axis=-1) - tf.reduce_mean(logits, axis=-1)
            loss = (1 - smoothing) * loss + smoothing * tf.reduce_sum(evenly)
        return loss

    def _values(self, state: Named, names: Sequence[str]) -> list[tf.Tensor]:
        return [tf.constant(state[name], self._dtype) for name in names]

    def _function(self, off: tuple[int, ...], has_starts: bool) -> Callable:
        """Returns the compiled step with some layers in inference mode."""
        if (off, has_starts) not in self._functions:
            spec = functools.partial(tf.TensorSpec, dtype=self._dtype)
            # Of unknown batch size, as in a strategy: a known size may select other kernels.
            signature: list[Any] = [
                [spec(v.shape) for v in self.model.trainable_variables],
                [spec(v.shape) for v in self.model.non_trainable_variables],
                tf.TensorSpec((None, *self.model.input_shape[1:]), tf.uint8),
                tf.TensorSpec((None,), tf.int32),
                *[spec(())] * 3,
                *[spec((None, *self.model.output_shape[1:]))] * has_starts,
            ]
            function = tf.function(self._step, input_signature=signature, autograph=False)
            with in_inference_mode([self.layers[index] for index in off]):
                function.get_concrete_function()  # Traces it.
            self._functions[off, has_starts] = function
        return self._functions[off, has_starts]

    def _step(
        self, weights: list[tf.Tensor], statistics: list[tf.Tensor], images: tf.Tensor,
        labels: tf.Tensor, divisor: tf.Tensor, start: tf.Tensor, loss_scale: tf.Tensor,
        starts: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:  # fmt: skip
        with tf.GradientTape() as tape:
            tape.watch(weights)
            logits, left = self.model.stateless_call(weights, statistics, images, training=True)
            loss = self.loss(logits, labels) / divisor
        if starts is None:
            gradients = tape.gradient(loss, weights, output_gradients=start)
        else:
            by_logits = tf.cast(starts * start, logits.dtype)
            gradients = tape.gradient(logits, weights, output_gradients=by_logits)
        if self._scales_loss:
            gradients = [gradient / loss_scale for gradient in gradients]
        return logits, loss, gradients, left


class StrategyOracle(Oracle):
    """Computes steps of a training with any strategy on one device; see `lockstep.oracles.Oracle`.

    Args:
        model_fn: builds the model.
        optimizer_fn: creates the optimizer.
        about: description of the training.
        precision: Keras' dtype policy of the layers.
        label_smoothing: fraction of the target that is spread evenly over all classes.
        num_threads: number of shards to compute in parallel.
        examples: returns images and labels of the data set, and mirrored ones if any.
    """

    may_mix = False  # Each loss is a sum over examples, which BatchNorm alone mixes, by design.
    records_overflow = True
    random_layers: tuple[int, ...] = ()

    def __init__(
        self, model_fn: Callable[[], keras.Model],
        optimizer_fn: Callable[[], keras.optimizers.Optimizer], about: About, *,
        precision: str = "float32", label_smoothing: float = 0.0, num_threads: int = 1,
        examples: Callable[[], Iterable[Batch]] = tuple,
    ):  # fmt: skip
        self._model_fn, self._about, self._examples = model_fn, about, examples
        self._precision, self._label_smoothing = precision, label_smoothing
        self._num_threads = num_threads
        with in_dtype("float32", precision):
            model, self._optimizer = model_fn(), optimizer_fn()
        self._optimizer.build(model.trainable_variables)
        slots = zip(optimizer_names(self._optimizer), self._optimizer.variables, strict=True)
        self._variables = {variable.path: variable for variable in model.variables} | dict(slots)
        self._weights = [variable.path for variable in model.trainable_variables]
        self._initial = {n: variable.numpy() for n, variable in self._variables.items()}
        self._updates: dict[tuple[tuple[str, Any], ...], Callable] = {}
        layers = [layer for layer in flatten_layers(model) if not layer._layers]
        self.layer_names = [layer.name for layer in layers]
        self.layers_with_statistics = tuple(
            index for index, layer in enumerate(layers) if layer.non_trainable_variables
        )
        self.unit = max([EPS, *(UNITS.get(layer.compute_dtype, EPS) for layer in layers)])
        self.units = dict.fromkeys(self._variables, EPS)
        self.scales_loss = LOSS_SCALE in self._variables
        self.tracks = set(self._variables) - {variable.path for variable in model.variables}
        self.why_not_exact = "" if self.unit == EPS else "the model does not compute in float32"
        has_several = len(about.shards) > 1
        self.synchronizes = bool(
            about.syncs_batch_norm and has_several and self.layers_with_statistics
        )

    @classmethod
    def of(cls, spec: TrainingSpec, about: About, *, num_threads: int = 1) -> "StrategyOracle":
        """Creates the oracle of a training."""

        def examples() -> Iterator[Batch]:
            images, labels = spec.dataset.train_images, spec.dataset.train_labels
            yield [images, labels.astype(np.int32)]
            if spec.flips:
                yield [images[:, :, ::-1], labels.astype(np.int32)]

        return cls(
            spec.build_model, spec.create_optimizer, about,
            precision=spec.config.training.precision, label_smoothing=spec.label_smoothing,
            num_threads=num_threads, examples=examples,
        )  # fmt: skip

    # Three models, each built when it is needed first.

    @functools.cached_property
    def _own(self) -> CompiledStep:
        return self._compiled("float32", self._precision, mean_of_squares=self.synchronizes)

    @functools.cached_property
    def _exact(self) -> CompiledStep:
        return self._compiled("float64", "float64")

    @functools.cached_property
    def _fine(self) -> CompiledStep:
        return self._compiled("float32", "float32")

    def _compiled(self, dtype: str, precision: str, **options: Any) -> CompiledStep:
        return CompiledStep(
            self._model_fn, dtype, precision, label_smoothing=self._label_smoothing,
            scales_loss=self.scales_loss, **options,
        )  # fmt: skip

    def compile(self) -> None:
        """Traces the computations of a step, before they are needed."""
        if not self.synchronizes:
            self._own._function((), False)
        self._update(clips=True)

    def start(self) -> Named:
        """Returns the state that model, recipe and seed define."""
        return self._initial

    def known_examples(self) -> set[int]:
        """Returns the hashes of all training examples."""
        return {row for data in self._examples() for row in rows_of(data)}

    def bitwise(self, asks: Sequence[Ask], total: int) -> list[Computed]:
        """Computes shards exactly as manual, mirrored, single and pipeline do, bit for bit."""
        with concurrent.futures.ThreadPoolExecutor(self._num_threads) as pool:
            return list(pool.map(lambda ask: self._own.run(ask, total), asks))

    def compute(self, ask: Ask, *, exactly: bool = False) -> Computed:
        """Computes a shard in float32, or in float64; see `Oracle`."""
        model = self._exact if exactly else self._own
        computed = model.run(ask, max(1, len(ask.data[0])))
        is_skipped = self.scales_loss and not are_finite(computed.raw)
        return computed._replace(raw={}) if is_skipped else computed

    def compute_finely(self, ask: Ask) -> Computed:
        """Computes a shard with float32 layers."""
        return self._fine.run(ask, max(1, len(ask.data[0])))

    def loss(
        self, state: Named, data: Batch, y_pred: Batch, masks: Batch, *, weighted: bool = True
    ) -> float:
        """Returns the mean loss of given logits."""
        labels = tf.constant(data[1], tf.int32)
        return float(self._own.loss(tf.constant(y_pred[0]), labels, "float64")) / max(
            1, len(labels)
        )

    def loss_gradients(self, state: Named, data: Batch, y_pred: Batch, masks: Batch) -> Batch:
        """Returns the gradient of that loss with respect to the logits."""
        logits, labels = tf.constant(y_pred[0]), tf.constant(data[1], tf.int32)
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = self._own.loss(logits, labels, "float64") / max(1, len(labels))
        return [tape.gradient(loss, logits).numpy()]

    def backward_faults(self, ask: Ask) -> Iterator[tuple[str, str, Callable[[], Named]]]:
        """Yields the gradients of a split layer without the sums of its backward pass."""
        about = self._about
        held = about.parts[: len(about.parts) // about.num_replicas]
        if len(held) < 2 or any(set(part) != set(held[0]) for part in held):
            return
        sizes = {name: [part[name][-1] for part in held] for name in held[0]}
        yield (
            "forgotten_backward_sum",
            f"those of {len(held)} devices that each keep their own gradient by the channels of a"
            " gathered input, not the sum over the devices",
            lambda: self._own.run_eagerly(ask, without_backward_sums(sizes)),
        )

    def targets(self, data: Batch) -> tuple[int, list[np.ndarray]]:
        """Returns that the images are the only input, and no sample weights."""
        return 1, []

    def clip(self, gradients: Named) -> Named:
        """Returns gradients after the optimizer's clipping."""
        clipped = self._optimizer._clip_gradients(list(map(to_tf, gradients.values())))
        return dict(zip(gradients, map(to_numpy, clipped), strict=True))

    def limits(self) -> str:
        """Returns the thresholds of the optimizer's clipping in words; "" without clipping."""
        return limits_of(self._optimizer)

    def update(self, before: Named, sums: Named, **changes: Any) -> Named:
        """Returns all variables after the optimizer's update; see `Oracle`."""
        for name in (*self._weights, *self.tracks):
            self._variables[name].assign(before[name])
        self._update(**changes)([tf.constant(sums[name]) for name in self._weights])
        changed = {n: self._variables[n].numpy() for n in (*self._weights, *self.tracks)}
        return {**before, **changed}

    def _update(self, **changes: Any) -> Callable:
        """Returns the compiled update with some changes."""
        key = tuple(sorted(changes.items()))
        if key not in self._updates:
            weights = [self._variables[name] for name in self._weights]

            def apply(gradients: list[tf.Tensor]) -> None:
                self._optimizer.apply(gradients, weights)

            signature = [[tf.TensorSpec(w.shape, tf.float32) for w in weights]]
            function = tf.function(apply, input_signature=signature, autograph=False)
            with changed_optimizer(self._optimizer, **changes):
                function.get_concrete_function()  # Traces it.
            self._updates[key] = function
        return self._updates[key]
