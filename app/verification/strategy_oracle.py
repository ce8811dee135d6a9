"""Computes the steps of our own trainings on one device, without a strategy.

Shares no code with the strategies, not even the scaling of the loss or the update, so that it is an
independent reference.
"""

import concurrent.futures
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from app.data.input_pipeline import augmented_versions
from app.training.optimizers import ScaledSGD
from app.training.training_spec import TrainingSpec
from lockstep.data.trace import Trace
from lockstep.numeric.arrays import EPS, Named, are_finite, rows_of
from lockstep.oracles import Ask, Computed
from lockstep.oracles.keras import KerasOracle, OneDevice, in_dtype, in_float64, to_numpy
from lockstep.recorders.common import Hooks
from strategies.tf_private import flatten_layers, learning_rate_schedule

_LOSS_SCALE = "optimizer/loss_scale"  # The optimizer's variable, with gradients in float16.


class SkippingSGD(keras.optimizers.SGD):
    """Keras' SGD with the loss scale of `ScaledSGD`, which it computes by itself; runs eagerly.

    Args:
        optimizer: has the settings, and is not changed.
    """

    def __init__(self, optimizer: ScaledSGD):
        rate = learning_rate_schedule(optimizer) or float(optimizer.learning_rate)
        super().__init__(rate, optimizer.momentum, optimizer.nesterov, weight_decay=optimizer.decay)
        self._scale, self._growth_steps = optimizer.initial_scale, optimizer.growth_steps

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the variables of `ScaledSGD`, in the same order."""
        super().build(variables)
        initial = keras.initializers.Constant(self._scale)
        self.loss_scale = self.add_variable((), initial, dtype="float32", name="loss_scale")
        self.finite_steps = self.add_variable((), dtype="int64", name="finite_steps")

    def apply(
        self,
        grads: Sequence[tf.Tensor],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """Updates the weights if all gradients are finite, then the scale."""
        scale, count = float(self.loss_scale), int(self.finite_steps) + 1
        if are_finite([np.asarray(gradient) for gradient in grads]):
            super().apply(grads, trainable_variables)
            factor = 2.0 if count >= self._growth_steps else 1.0
        else:
            self.iterations.assign_add(1)
            factor, count = 0.5, 0
        self.loss_scale.assign(max(scale * factor, 1.0))
        self.finite_steps.assign(0 if factor > 1 else count)


class StrategyOracle(KerasOracle):
    """Computes steps of a training with any strategy on one device; see `lockstep.oracles.Oracle`.

    Args:
        spec: specification of the training.
        trace: its first step has a state and examples.
        num_threads: number of shards to compute in parallel.
    """

    may_mix = False  # Each loss is a sum over examples, which BatchNorm alone mixes, by design.
    records_overflow = True

    def __init__(self, spec: TrainingSpec, trace: Trace, *, num_threads: int = 1):
        self._spec, self._num_threads = spec, num_threads
        self._synchronizes = trace.about.syncs_batch_norm and len(trace.shards) > 1
        with in_dtype("float32", spec.config.training.precision):
            super().__init__(self._build, trace)
        self._initial = self._one.read()
        self.scales_loss = _LOSS_SCALE in self._initial

    def _build(self) -> keras.Model:
        model = self._spec.build_model()
        for layer in flatten_layers(model):
            if self._synchronizes and isinstance(layer, keras.layers.BatchNormalization):
                layer.synchronized = True  # Its variance is then rounded as over devices.
        optimizer = self._spec.create_optimizer()
        if isinstance(optimizer, ScaledSGD):
            optimizer = SkippingSGD(optimizer)  # The update is then Keras' own.
        model.compile(optimizer=optimizer, loss=self._mean_loss, auto_scale_loss=False)
        return model

    def _build_in_float64(self, build: Callable[[], keras.Model]) -> str:
        """Returns why the model is not to be built in float64; it is built when it is needed."""
        return "" if self.unit == EPS else "the model does not compute in float32"

    def _loss_sum(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the losses, in the order of operations of a training step.

        Another order is equally exact, but results would not be bitwise equal.
        """
        loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        if smoothing := self._spec.label_smoothing:
            evenly = tf.reduce_logsumexp(logits, axis=-1) - tf.reduce_mean(logits, axis=-1)
            loss = (1 - smoothing) * loss + smoothing * tf.reduce_sum(evenly)
        return loss

    def _mean_loss(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        loss = self._loss_sum(tf.cast(labels, tf.int32), logits)
        return loss / tf.cast(tf.shape(logits)[0], loss.dtype)

    def start(self) -> Named:
        """Returns the state that model, recipe and seed define."""
        return self._initial

    def known_examples(self) -> set[int]:
        """Returns the hashes of all training examples, in all versions of the augmentation."""
        versions = augmented_versions(self._spec.dataset.train_images, self._spec.augmentation)
        labels = self._spec.dataset.train_labels.astype(np.int32)
        return {row for version in versions for row in rows_of([version, labels])}

    def compute(self, ask: Ask, *, exactly: bool = False) -> Computed:
        """Computes a shard in float32, or in float64; see `Oracle`."""
        if exactly and self._exact is None:
            with in_float64():
                self._exact = OneDevice(self._build(), self._trace, is_float64=True)
        if not self.scales_loss or exactly:
            return super().compute(ask, exactly=exactly)
        scale = ask.state[_LOSS_SCALE]
        if ask.starts is not None:
            ask = ask._replace(starts=[start * scale for start in ask.starts])
        computed = super().compute(ask._replace(scales=(ask.scales[0] * scale, 0.0)))
        raw = {name: gradient / scale for name, gradient in computed.raw.items()}
        return computed._replace(raw=raw if are_finite(raw) else {})

    # --- Bit for bit -----------------------------------------------------------------------------

    def bitwise(self, asks: Sequence[Ask], total: int) -> list[Computed]:
        """Computes shards exactly as manual, mirrored, single and pipeline do, bit for bit."""
        with concurrent.futures.ThreadPoolExecutor(self._num_threads) as pool:
            return list(pool.map(lambda ask: self._compute_bits(ask, total), asks))

    def compile(self) -> None:
        """Traces the computation of a step, before it is needed."""
        if not self.synchronized_layers:
            self._step.get_concrete_function()

    def _compute_bits(self, ask: Ask, total: int) -> Computed:
        model, scale = self._one.model, ask.state.get(_LOSS_SCALE, 1.0)
        names = {id(variable): name for name, variable in self._one.variables.items()}
        weights = [names[id(variable)] for variable in model.trainable_variables]
        statistics = [names[id(variable)] for variable in model.non_trainable_variables]
        images, labels = ask.data
        logits, loss, gradients, left = self._step(
            [tf.constant(ask.state[name]) for name in weights],
            [tf.constant(ask.state[name]) for name in statistics],
            tf.constant(images),
            tf.constant(labels, tf.int32),
            tf.constant(total, tf.float32),
            tf.constant(scale, tf.float32),
        )
        raw = dict(zip(weights, (gradient.numpy() for gradient in gradients), strict=True))
        after = dict(zip(statistics, (array.numpy() for array in left), strict=True))
        return Computed([to_numpy(logits)], (float(loss), 0.0), raw, {**ask.state, **after})

    @functools.cached_property
    def _step(self) -> Any:
        """The step as a compiled function, in the order of operations of a training step."""
        model, spec = self._one.model, functools.partial(tf.TensorSpec, dtype=tf.float32)

        def step(
            weights: list[tf.Tensor], statistics: list[tf.Tensor], images: tf.Tensor,
            labels: tf.Tensor, total: tf.Tensor, scale: tf.Tensor,
        ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:  # fmt: skip
            with tf.GradientTape() as tape:
                tape.watch(weights)
                logits, left = model.stateless_call(weights, statistics, images, training=True)
                loss = self._loss_sum(labels, tf.cast(logits, tf.float32)) / total
            gradients = tape.gradient(loss, weights, output_gradients=scale)
            if self.scales_loss:
                gradients = [gradient / scale for gradient in gradients]
            return logits, loss, gradients, left

        # Of unknown batch size, as in a strategy: a known size may select other kernels.
        signature = [
            [spec(v.shape) for v in model.trainable_variables],
            [spec(v.shape) for v in model.non_trainable_variables],
            tf.TensorSpec((None, *model.input_shape[1:]), tf.uint8),
            tf.TensorSpec((None,), tf.int32),
            spec(()),
            spec(()),
        ]
        return tf.function(step, input_signature=signature, autograph=False)

    # --- Split layers ----------------------------------------------------------------------------

    def backward_faults(self, ask: Ask) -> Iterator[tuple[str, str, Callable[[], Named]]]:
        """Yields the gradients of a split layer without the sums of its backward pass."""
        about = self._trace.about
        held = about.parts[: len(about.parts) // about.num_replicas]
        if len(held) < 2 or any(set(part) != set(held[0]) for part in held):
            return
        for of_maps, device in itertools.product((False, True), (None, *range(len(held)))):
            whose = "their own gradient" if device is None else f"that of device {device}"
            text = (
                f"those of {len(held)} devices that each keep {whose} by the channels of a gathered"
                f" {'feature map' if of_maps else 'input'}, not the sum over the devices"
            )
            predict = functools.partial(self._without_backward_sums, ask, held, device, of_maps)
            yield "forgotten_backward_sum", text, predict

    def _without_backward_sums(
        self, ask: Ask, held: Sequence[Mapping[str, Sequence[int]]], device: int | None,
        of_maps: bool,
    ) -> Named:  # fmt: skip
        """Returns the gradients if gathers return to each device the gradient of one device.

        Each device computes its own output channels from a gathered input. In the backward pass,
        the gradient by a channel of that input should be the sum over all devices; here, it is that
        of one device.

        Args:
            ask: the step.
            held: for each device, weight → shape of its part, whose last axis is output channels.
            device: the device whose gradient is used; None for the one that holds the channel.
            of_maps: whether only gathers of feature maps do so.
        """
        # Each number of channels is split over the devices in one way.
        split = {sum(sizes): sizes for sizes in ([p[name][-1] for p in held] for name in held[0])}
        flat: dict[int, int] = {}  # Length of a flattened feature map → its channels.

        def flatten(inner: Callable, x: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
            y = inner(x, *args, **kwargs)
            flat[y.shape[-1]] = x.shape[-1]
            return y

        def call(inner: Callable, x: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
            num_channels = flat.get(x.shape[-1], x.shape[-1])
            is_map = x.shape.rank == 4 or num_channels != x.shape[-1]
            if num_channels not in split or (of_maps and not is_map):
                return inner(x, *args, **kwargs)
            owners = np.repeat(range(len(held)), split[num_channels])
            owners = np.tile(owners, x.shape[-1] // num_channels)
            parts = []
            for own in range(len(held)):
                keeps = owners == own if device is None else np.full(len(owners), own == device)
                y = inner(tf.where(keeps, x, tf.stop_gradient(x)), *args, **kwargs)
                parts.append(tf.split(y, split[y.shape[-1]], axis=-1)[own])
            return tf.concat(parts, axis=-1)

        with Hooks() as hooks:
            for layer in self._one.layers:
                if isinstance(layer, keras.layers.Conv2D | keras.layers.Dense):
                    hooks.hook(layer, "call", call)
                elif isinstance(layer, keras.layers.Flatten | keras.layers.Reshape):
                    hooks.hook(layer, "call", flatten)
            return self.compute(ask).raw
