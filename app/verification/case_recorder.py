"""Records a case that a strategy of this project trains, in the format of `Recorder`."""

import io
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from app.training.optimizers import FusedSGD
from recorders.lockstep_keras import (
    Arrays,
    Hooks,
    Recording,
    constants_of,
    inner_optimizer,
    plain_copy,
    settings_of,
    to_json,
    to_numpy_dtype,
)
from strategies.base import Strategy
from strategies.keras_private import is_seed
from strategies.observer import Observer, Predicted
from strategies.one_device import seed_of_replica
from strategies.workers import Workers


class CaseRecorder(Observer):
    """Observes a strategy with an objective, and hooks the clipping of its optimizers.

    Args:
        strategy: a built strategy before its first step; this object replaces its observer.
        structure: the structure of a batch, any nest.
    """

    def __init__(self, strategy: Strategy, structure: Any):
        self._strategy = strategy
        self._kept: dict[tuple[str, int], Arrays] = {}
        objective = strategy.objective
        assert objective is not None
        self._objective = objective
        self._recording = Recording(strategy.num_replicas)
        self._recording.structure = to_json(structure)
        self._recording.order = "reduce, clip"
        self._recording.whole_loss = not objective.has_own_train_step
        model = strategy.model
        self._recording.describe(model, model.optimizer)
        self._optimizer = inner_optimizer(model.optimizer)
        fused = isinstance(self._optimizer, FusedSGD)  # Bitwise identical to Keras' SGD.
        name = "SGD" if fused else type(self._optimizer).__name__
        self._recording.optimizer = {"class": name, "framework": "keras"}
        self._recording.optimizer |= constants_of(self._optimizer)
        self._seeds = [f"model/{v.path}" for v in model.variables if is_seed(model, v)]
        strategy.observer = self

    def record(self, iterator: Any, steps: Collection[int]) -> Recording:
        """Trains up to the last of these steps and returns their recording.

        Args:
            iterator: the result of `strategy.distribute`.
            steps: numbers of the steps, from 0.
        """
        recording = self._recording
        recording.steps, recording.numbers, recording.settings = [], [], []
        with Hooks() as hooks:
            for replica in self._strategy.replicas:
                optimizer = replica.optimizer
                if optimizer.gradient_accumulation_steps:
                    continue  # It clips gradients other than the sum of this step.
                hooks.hook(optimizer, "_clip_gradients", self._clipping_of(replica.replica_id))
            for number in range(max(steps) + 1):
                if number in steps:
                    recording.numbers.append(number)
                    recording.settings.append(self._settings())
                    recording.steps.append(self._train_step(iterator))
                else:
                    self._strategy.train_steps(iterator, 1)
        recording.predicted = to_json(self._objective.predicted)
        weights = self._objective.weights(self._strategy.model)
        recording.gradients = [variable.path for variable in weights]
        return _joined(recording, self._strategy.workers)

    def _settings(self) -> list[dict[str, Any]]:
        """Returns the settings of the optimizer for the next step."""
        rate = float(to_numpy_dtype(self._optimizer.learning_rate))
        return settings_of(self._strategy.model, self._optimizer, rate)

    def _train_step(self, iterator: Any) -> dict[tuple[str, int], Arrays]:
        """Trains one step and returns its arrays."""
        before, self._kept = self._states(), {}
        self._strategy.train_steps(iterator, 1)
        taken = self._kept
        states = zip(self._strategy.local_copy_ids, before, self._states(), strict=True)
        for r, old, new in states:
            taken |= {("before", r): old, ("after", r): new}
        return taken

    def on_predictions(self, replica_id: int | tf.Tensor, predicted: Predicted) -> None:
        """Keeps the examples, and predictions and loss if the step shows them."""
        self._keep("data", replica_id, predicted.examples)
        if predicted.loss is not None:
            self._keep("y_pred", replica_id, predicted.predictions)
            masks = [tf.zeros([]) if mask is None else mask for mask in predicted.masks]
            self._keep("mask", replica_id, masks)
            self._keep("loss", replica_id, [predicted.loss, predicted.regular])

    def on_gradients(
        self, replica_id: int | tf.Tensor, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Keeps the gradients that a replica sends."""
        self._keep("raw", replica_id, gradients)
        return gradients

    def on_update(self, copy_id: int | tf.Tensor, summed_gradients: list[tf.Tensor]) -> None:
        """Keeps the sums."""
        self._keep("sums", copy_id, summed_gradients)

    def _clipping_of(self, replica_id: int | tf.Tensor) -> Any:
        """Returns a hook that keeps the clipped sums of an optimizer."""

        def clip(inner: Any, gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
            context = tf.distribute.get_replica_context()
            is_one = context.num_replicas_in_sync == 1
            clipped = inner(gradients)
            self._keep(
                "clipped", replica_id if is_one else context.replica_id_in_sync_group, clipped
            )
            return clipped

        return clip

    def _keep(self, kind: str, replica_id: int | tf.Tensor, tensors: Sequence[tf.Tensor]) -> None:
        """Keeps tensors of a replica when they are computed."""

        def keep(replica_id: np.ndarray, *arrays: np.ndarray) -> None:
            self._kept[kind, int(replica_id)] = [plain_copy(array) for array in arrays]

        known = [tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t for t in tensors]
        tf.numpy_function(keep, [replica_id, *known], [])

    def _states(self) -> list[Arrays]:
        """Returns the variables of each replica, with the replica's seeds."""
        return [
            [
                seed_of_replica(array, r).numpy() if name in self._seeds else _known(array)
                for name, array in state.items()
            ]
            for r, state in zip(
                self._strategy.local_copy_ids, self._strategy.copy_states(), strict=True
            )
        ]


def _joined(recording: Recording, workers: Workers) -> Recording:
    """Returns the recording of the replicas of all workers, on each worker."""
    if workers.count == 1:
        return recording
    own = io.BytesIO()
    recording.write(own)
    first, *others = (
        Recording.load(io.BytesIO(message)) for message in workers.gather(own.getvalue())
    )
    for other in others:
        for step, more in zip(first.steps, other.steps, strict=True):
            step.update(more)
    return first


def _known(array: np.ndarray) -> np.ndarray:
    """Returns bfloat16, which NumPy cannot save, as float32."""
    return array.astype(np.float32) if array.dtype == tf.bfloat16.as_numpy_dtype else array
