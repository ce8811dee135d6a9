"""Records the steps of a strategy, and the same steps on one device from the recorded states.

Both are recordings like those of any script, which `lockstep.compare` compares.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from app.errors import ConfigError
from app.options.rules import SINGLE
from app.records.history import versions
from app.training.build import TrainingRun
from lockstep.data.trace import STATE, STATISTIC, WEIGHT, About, Trace, Variable
from lockstep.recorders.keras.description import computed_in, described_layers, layouts_of
from lockstep.recorders.keras.optimizers import constants_of
from strategies.base import Observer, Shard, Strategy, sum_of_losses
from strategies.collectives import shard_bounds
from strategies.mirrored import batch_norm_layers
from strategies.tf_private import learning_rate_schedule

T = TypeVar("T")


class StepRecorder(Observer):
    """Observes the steps of a strategy, and adds the arrays of the last step to a trace.

    Args:
        strategy: a built strategy.
        inner: a second observer, which may inject a fault: what a shard computes is kept before it,
            the sums after it.
    """

    def __init__(self, strategy: Strategy, inner: Observer | None = None):
        self._strategy, self._inner = strategy, inner or Observer()
        self._kept: dict[tuple[str, int], list[np.ndarray]] = {}

    def about(self, steps: Sequence[int]) -> About:
        """Returns the description of a trace of these steps, with numbers from 0."""
        strategy, workers = self._strategy, self._strategy.workers
        return About(
            "lockstep",
            strategy.num_replicas,
            steps=tuple(steps),
            replicas=tuple(strategy.local_shard_ids) if workers.count > 1 else (),
            variables=_variables(strategy),
            gradients=tuple(variable.path for variable in strategy.model.trainable_variables),
            num_copies=strategy.num_copies,
            syncs_batch_norm=strategy.syncs_batch_norm,
            reduction="sum",
            computed_in=computed_in(strategy.model),
            optimizer={"class": type(strategy.optimizer).__name__, "framework": "keras"},
            settings=tuple([_settings(strategy.optimizer, step)] for step in steps),
            layers=tuple(described_layers(strategy.model)),
            versions=versions(),
        )

    def record_step(self, trace: Trace, position: int, train: Callable[[], T]) -> T:
        """Calls a function that runs one step, adds the step to a trace, and returns its result."""
        self._put_state(trace, position, "before")
        result = train()
        for (kind, item_id), arrays in sorted(self._kept.items()):
            trace.put(position, kind, item_id, arrays)
        self._kept.clear()
        self._put_state(trace, position, "after")
        return result

    def _put_state(self, trace: Trace, position: int, when: str) -> None:
        """Adds the variables of this worker to a trace, "before" or "after" a step.

        Those of a copy have averaged moving statistics; each shard also has its own.
        """
        strategy, averages = self._strategy, self._strategy.states.averaged_statistics()
        for copy_id, state in zip(strategy.local_copy_ids, strategy.states.per_copy(), strict=True):
            trace.put(position, when, copy_id, list((state | averages).values()))
        if not averages or strategy.num_shards == 1:
            return
        per_shard = strategy.states.shard_statistics()
        for shard_id, own in zip(strategy.local_shard_ids, per_shard, strict=True):
            found = {name: variable.numpy() for name, variable in own.items()}
            arrays = [found.get(name) for name in strategy.states.variable_names]
            trace.put(position, f"own_{when}", shard_id, arrays)

    def on_shard(
        self,
        shard_id: int | tf.Tensor,
        shard: Shard,
        logits: tf.Tensor,
        loss: tf.Tensor,
        gradients: list[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Keeps examples, logits, loss and gradients."""
        examples = [shard.images, shard.labels]
        self._keep(shard_id, data=examples, y_pred=[logits], loss=[loss], raw=gradients)
        return self._inner.on_shard(shard_id, shard, logits, loss, gradients)

    def on_update(self, copy_id: int | tf.Tensor, summed_gradients: list[tf.Tensor]) -> None:
        """Keeps the sums."""
        self._keep(copy_id, sums=summed_gradients)
        self._inner.on_update(copy_id, summed_gradients)

    def _keep(self, item_id: int | tf.Tensor, **tensors_of_kind: list[tf.Tensor]) -> None:
        """Keeps tensors of a shard or a copy, kind by kind, once they are computed."""

        def keep(item_id: np.ndarray, *arrays: np.ndarray) -> None:
            left = iter(arrays)
            for kind, tensors in tensors_of_kind.items():
                self._kept[kind, int(item_id)] = [np.array(next(left)) for _ in tensors]

        flat = [tensor for tensors in tensors_of_kind.values() for tensor in tensors]
        # NumPy cannot save bfloat16.
        kept = [tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t for t in flat]
        tf.numpy_function(keep, [item_id, *kept], [])


def _variables(strategy: Strategy) -> tuple[Variable, ...]:
    """Returns the description of all variables of a copy, in the order of `variable_names`."""
    weights, layouts = strategy.model.trainable_variables, layouts_of(strategy.model)
    found, prefixes = [], {f"{w.path.replace('/', '_')}_": w.path for w in weights}
    for name in strategy.states.variable_names:
        path = name.removeprefix("model/")
        if name in strategy.states.statistics_names:
            found.append(Variable(path, STATISTIC))
        elif name.startswith("model/"):
            found.append(Variable(path, WEIGHT, layouts.get(path, "")))
        else:  # For example optimizer/conv1_kernel_momentum.
            stem = path.removeprefix("optimizer/")
            prefix = max(filter(stem.startswith, prefixes), key=len, default="")
            of, slot = prefixes.get(prefix, ""), stem.removeprefix(prefix)
            found.append(Variable(path, STATE, layouts.get(of, ""), of=of, slot=slot))
    return tuple(found)


def _settings(optimizer: keras.optimizers.Optimizer, step: int) -> dict[str, Any]:
    """Returns the settings of an optimizer in a step, from 0, for all weights."""
    schedule = learning_rate_schedule(optimizer)
    rate = schedule(step) if schedule else optimizer.learning_rate
    # With `tf.distribute`, a variable has a copy on each device, which float() does not accept.
    return {**constants_of(optimizer), "learning_rate": float(keras.ops.convert_to_numpy(rate))}


def check_repeatable(model: keras.Model) -> None:
    """Checks that a step is a function of only weights and examples.

    Raises:
        ConfigError: a layer draws random numbers in training.
    """
    seeds = [v.path for v in model.variables if not np.issubdtype(np.dtype(v.dtype), np.floating)]
    if seeds:
        raise ConfigError(
            f"model {model.name} draws random numbers in training ({seeds[0]}), so a step"
            " cannot be repeated; leave out layers such as Dropout"
        )


def single_of(run: TrainingRun) -> TrainingRun:
    """Builds the training with `single`, on the first device of a training of this process."""
    device = dataclasses.replace(run.devices, names=run.strategy.local_devices[:1], workers=None)
    config = run.config.for_training(SINGLE, inject=None, verify_every=0)
    return TrainingRun(config, device, run.dataset)


class Reference:
    """Runs recorded steps again on one device, each from its recorded state, and records them.

    Model, optimizer and loss are those of the strategy `single`. Where BatchNorm normalises each
    shard by itself, the batch is computed in the same parts, each with the moving statistics of its
    shard: the same training, but for where it is computed.

    Args:
        run: the training with `single`.
        about: the description of the recorded steps.
    """

    def __init__(self, run: TrainingRun, about: About):
        self._run, self._strategy, self._model = run, run.strategy, run.strategy.model
        names = self._strategy.states.variable_names
        self._places = [names.index(f"model/{v.path}") for v in self._model.non_trainable_variables]
        is_in_parts = bool(self._places) and not about.syncs_batch_norm
        self._num_parts = about.num_replicas if is_in_parts else 1
        # BatchNorm then computes the variance as it does over replicas, which rounds differently.
        for layer in batch_norm_layers(self._model) if about.syncs_batch_norm else ():
            layer.synchronized = True
        self._step = tf.function(self._compute, self._signature(), autograph=False)

    def _signature(self) -> list[Any]:
        """Returns the types of the arguments of `_compute`."""
        others = [tf.TensorSpec(v.shape, v.dtype) for v in self._model.non_trainable_variables]
        return [  # As in a strategy, the size is unknown: a known one may select other kernels.
            tf.TensorSpec((None, *self._model.input_shape[1:]), tf.uint8),
            tf.TensorSpec((None,), tf.int32),
            tf.TensorSpec((self._num_parts, 2), tf.int32),
            [others] * self._num_parts,
        ]

    def about(self, recorded: About) -> About:
        """Returns the description of the reference's trace of recorded steps."""
        return dataclasses.replace(
            recorded, num_replicas=1, num_copies=1, replicas=(), replayed="the training"
        )

    def record_step(self, trace: Trace, recorded: Trace, position: int) -> None:
        """Runs a step from its state in `recorded`, and adds it to a trace.

        Args:
            trace: gets the step at the same position.
            recorded: the training; only its states are used.
            position: position of the step.
        """
        before = recorded.arrays(position, "before", 0) or []
        names = self._strategy.states.variable_names
        self._strategy.load_state(dict(zip(names, before, strict=True)))
        images, labels = self._run.batch(recorded.steps[position])
        parts = range(self._num_parts)
        bounds = np.array([shard_bounds(len(labels), len(parts), part) for part in parts], np.int32)
        statistics = self._statistics(recorded, position)
        logits, losses, sums, left = self._step(images, labels, bounds, statistics)
        gradients = [gradient.numpy() for gradient in sums]
        trace.put(position, "before", 0, before)
        trace.put(position, "data", 0, [images, labels])
        trace.put(position, "y_pred", 0, [np.concatenate([each.numpy() for each in logits])])
        trace.put(position, "loss", 0, [np.sum([loss.numpy() for loss in losses], dtype="f4")])
        trace.put(position, "raw", 0, gradients)
        trace.put(position, "sums", 0, gradients)
        after = self._after(left)
        trace.put(position, "after", 0, after)
        if len(parts) > 1:  # Tells that each part was computed by itself.
            trace.put(position, "shards", 0, [np.repeat(parts, np.diff(bounds)[:, 0])])
            for part in parts:  # Each replica ends the step with the mean of all statistics.
                trace.put(position, "own_after", part, after)

    def _statistics(self, recorded: Trace, position: int) -> list[list[np.ndarray]]:
        """Returns the moving statistics of each part before a step."""
        kind, found = "own_before" if self._num_parts > 1 else "before", []
        for part in range(self._num_parts):
            arrays: Any = recorded.arrays(position, kind, part)
            found.append([arrays[place] for place in self._places])
        return found

    def _after(self, per_part_statistics: list[list[tf.Tensor]]) -> list[np.ndarray]:
        """Returns the variables after a step, with the mean of the parts' statistics."""
        after = [variable.numpy() for variable in self._strategy.copies()[0].values()]
        for place, own in zip(self._places, zip(*per_part_statistics, strict=True), strict=True):
            after[place] = np.mean([tensor.numpy() for tensor in own], axis=0)
        return after

    def _compute(
        self,
        images: tf.Tensor,
        labels: tf.Tensor,
        bounds: tf.Tensor,
        statistics: list[list[tf.Tensor]],
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor], list[list[tf.Tensor]]]:
        """Returns logits, loss and statistics of each part, and gradients; updates the weights.

        Args:
            images, labels: the batch.
            bounds: start and end of each part.
            statistics: for each part, the non-trainable variables of the model.
        """
        model, (replica,) = self._model, self._strategy.replicas
        logits, losses, left, sums = [], [], [], list[tf.Tensor]()
        with tf.device(self._strategy.devices[0]):
            weights = [tf.identity(weight) for weight in replica.weights]
            for part, own in enumerate(statistics):
                rows = slice(bounds[part, 0], bounds[part, 1])
                with tf.GradientTape() as tape:
                    tape.watch(weights)
                    outputs, moved = model.stateless_call(weights, own, images[rows], training=True)
                    smoothing = self._strategy.label_smoothing
                    loss = sum_of_losses(outputs, labels[rows], smoothing)
                    loss /= tf.cast(tf.size(labels), tf.float32)
                gradients = tape.gradient(loss, weights)
                sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else gradients
                logits.append(tf.cast(outputs, tf.float32))
                losses.append(loss)
                left.append(moved)
            replica.optimizer.apply(sums, model.trainable_variables)
        return logits, losses, sums, left
