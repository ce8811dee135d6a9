"""What the cases of the zoo are made of: programs, small models, data and input pipelines."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

GLOBAL_BATCH_SIZE = 12


def regression_data(num_examples: int = 24) -> tf.data.Dataset:
    """Returns batches of 6 numbers and 2 targets, the same ones on every call."""
    examples = tf.data.Dataset.from_tensor_slices(regression_arrays(num_examples))
    return examples.batch(GLOBAL_BATCH_SIZE)


def regression_arrays(num_examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs of shape (examples, 6) and targets of shape (examples, 2)."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(num_examples, 6)).astype("float32")
    return x, np.tanh(x @ generator.normal(size=(6, 2))).astype("float32")


@dataclasses.dataclass(frozen=True)
class Program:
    """A training under a strategy.

    Attributes:
        model: builds and compiles the model.
        data: returns the batches that one device trains on.
        distribute: returns what `fit` is given under a strategy in place of the data.
        evaluation_data, distribute_evaluation: the same for `evaluate`; without data, no evaluation
            is compared.
    """

    model: Callable[[], keras.Model]
    data: Callable[[], tf.data.Dataset] = regression_data
    distribute: Callable[[tf.distribute.Strategy], Any] | None = None
    evaluation_data: Callable[[], tf.data.Dataset] | None = None
    distribute_evaluation: Callable[[tf.distribute.Strategy], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """A publicly reported bug, and what is to be found.

    Attributes:
        thread: where it is reported, after `https://github.com/`.
        stage, detail, status: of the finding.
        wrong: a program with the bug.
        right: its twin, which is corrected.
        steps, replicas: of the finding; None for any.
        tensors: a part of the names of the finding's tensors.
        also: further findings that belong to the case, as (stage, detail, status).
        num_replicas: number of replicas to train on.
    """

    thread: str
    stage: str
    detail: str
    wrong: Program
    right: Program
    status: str = "fault"
    steps: tuple[int, ...] | None = None
    replicas: tuple[int, ...] | None = None
    tensors: str = ""
    also: tuple[tuple[str, str, str], ...] = ()
    num_replicas: int = 2

    @property
    def items(self) -> tuple[str, ...] | None:
        """The names of the replicas, as in findings."""
        return None if self.replicas is None else tuple(f"replica {r}" for r in self.replicas)

    @property
    def link(self) -> str:
        """The address of the thread."""
        return f"https://github.com/{self.thread}"


def dense(
    *between: keras.layers.Layer,
    optimizer: keras.optimizers.Optimizer | None = None,
    loss: Any = "mse",
    kind: type[keras.Sequential] = keras.Sequential,
    metrics: Sequence = (),
    **first: object,
) -> keras.Model:
    """Returns a compiled network for `regression_data`, trained with SGD by default.

    Args:
        between: layers between the two dense ones.
        optimizer, loss, metrics: what it is compiled with.
        kind: class of the model.
        first: options of the first dense layer.
    """
    hidden = keras.layers.Dense(8, activation="tanh", name="hidden", **first)
    layers = [keras.Input((6,)), hidden, *between, keras.layers.Dense(2, name="out")]
    model = kind(layers, name="network")
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, metrics=list(metrics))
    return model


class OwnStep(keras.Sequential):
    """A custom `train_step` whose loss is `loss_of(x, y)`."""

    def loss_of(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError

    def losses_of(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Returns the loss of each example."""
        return tf.reduce_mean(tf.square(y - self(x, training=True)), axis=-1)

    def train_step(self, data: tuple) -> dict:
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        self.apply(tape.gradient(loss, self.trainable_weights))
        return {"loss": loss}

    def apply(self, gradients: Sequence[tf.Tensor]) -> None:
        self.optimizer.apply(gradients, self.trainable_weights)


def one_pipeline_for_each_replica(
    strategy: tf.distribute.Strategy, pipelines: Sequence[tf.data.Dataset]
) -> tf.distribute.DistributedDataset:
    """Hands the n-th batch of pipeline r to replica r in step n.

    It stands for programs that run once for each device, each with a separate input pipeline.
    """

    def in_turn(*batches: tuple) -> tf.data.Dataset:
        turns = tf.data.Dataset.from_tensors(batches[0])
        for batch in batches[1:]:
            turns = turns.concatenate(tf.data.Dataset.from_tensors(batch))
        return turns

    merged = tf.data.Dataset.zip(*pipelines).flat_map(in_turn)
    return strategy.distribute_datasets_from_function(lambda context: merged)


def num_replicas() -> int:
    """Returns the number of replicas of the strategy; 1 without one."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def replica_id() -> tf.Tensor:
    """Returns the number of the replica that this runs on; 0 without a strategy."""
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, "int32")
