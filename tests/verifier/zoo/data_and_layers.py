"""Reported bugs in input pipelines, evaluations, random numbers and BatchNorm."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from .small import (
    GLOBAL_BATCH_SIZE,
    Case,
    Program,
    dense,
    one_pipeline_for_each_replica,
    regression_arrays,
    regression_data,
    replica_id,
)

layers, optimizers = keras.layers, keras.optimizers
Distribute = Callable[[tf.distribute.Strategy], tf.data.Dataset]


# --- Input pipelines -----------------------------------------------------------------------------


def shards(strategy: tf.distribute.Strategy, *, is_sharded: bool) -> tf.data.Dataset:
    num = strategy.num_replicas_in_sync
    whole = regression_data().unbatch().batch(GLOBAL_BATCH_SIZE // num)
    parts = [whole.shard(num, replica) if is_sharded else whole for replica in range(num)]
    return one_pipeline_for_each_replica(strategy, parts)


def with_noise(seeds: tuple[int, int]) -> list[tf.data.Dataset]:
    """Returns the pipeline of each replica, and that of the global batches that they make up."""
    (x, y), size, parts = regression_arrays(24), GLOBAL_BATCH_SIZE // 2, []
    for replica, seed in enumerate(seeds):
        rows = (np.arange(24) // size) % 2 == replica
        noise = np.random.default_rng(seed).normal(0, 0.3, (12, 6)).astype("float32")
        parts.append((x[rows] + noise, y[rows]))
    whole = [np.stack(arrays, 1) for arrays in zip(*parts, strict=True)]
    whole = [array.reshape(-1, size, 2, array.shape[-1]).swapaxes(1, 2) for array in whole]
    whole = [array.reshape(-1, array.shape[-1]) for array in whole]
    pairs = [*((part, size) for part in parts), (tuple(whole), 2 * size)]
    return [tf.data.Dataset.from_tensor_slices(arrays).batch(n) for arrays, n in pairs]


def augmented(seeds: tuple[int, int]) -> Distribute:
    return lambda strategy: one_pipeline_for_each_replica(strategy, with_noise(seeds)[:-1])


def in_orders(*seeds: int, num_examples: int = 24) -> tf.data.Dataset:
    """Returns one epoch for each number, which is the seed of its order."""
    examples = regression_data(num_examples).unbatch()
    first, *others = (
        examples.shuffle(num_examples, seed=seed, reshuffle_each_iteration=False).batch(
            GLOBAL_BATCH_SIZE
        )
        for seed in seeds
    )
    for epoch in others:
        first = first.concatenate(epoch)
    return first


def four_batches() -> tf.data.Dataset:
    return regression_data(48)


def shuffled(seed: int = 0) -> tf.data.Dataset:
    return in_orders(seed, num_examples=48)


def resumed(data: Callable, rest: Callable) -> Distribute:
    """Returns a run that is interrupted after two of four steps, and continues with the rest."""
    return lambda strategy: data().take(2).concatenate(rest())


PIPELINES = {
    # With Horovod, no data set is sharded automatically: `dataset.shard` is missing.
    "same_data_everywhere": Case(
        "horovod/horovod/issues/223", "examples", "same_examples", replicas=(0, 1, 2),
        num_replicas=3,
        wrong=Program(dense, distribute=lambda strategy: shards(strategy, is_sharded=False)),
        right=Program(dense, distribute=lambda strategy: shards(strategy, is_sharded=True)),
    ),
    # Workers of a data loader inherit the state of NumPy's generator: equal noise, crops and flips.
    "equal_augmentation": Case(
        "pytorch/pytorch/issues/5059", "examples", "other_examples",
        wrong=Program(dense, lambda: with_noise((0, 1))[-1], augmented((0, 0))),
        right=Program(dense, lambda: with_noise((0, 1))[-1], augmented((0, 1))),
    ),
    # Without `set_epoch`, every epoch of a `DistributedSampler` has the same order.
    "no_reshuffle": Case(
        "pytorch/pytorch/issues/31771", "examples", "other_examples", steps=(2, 3),
        wrong=Program(dense, lambda: in_orders(0, 1), lambda strategy: in_orders(0, 0)),
        right=Program(dense, lambda: in_orders(0, 1), lambda strategy: in_orders(0, 1)),
    ),
    # A checkpoint without the position in the data: the epoch starts from its beginning.
    "resume_repeats_data": Case(
        "huggingface/accelerate/issues/685", "examples", "other_examples", steps=(2, 3),
        wrong=Program(dense, four_batches, resumed(four_batches, lambda: four_batches().take(2))),
        right=Program(dense, four_batches, resumed(four_batches, lambda: four_batches().skip(2))),
    ),
    # The right number of batches is skipped, but of an order that was never trained on.
    "resume_reshuffles": Case(
        "huggingface/accelerate/issues/2016", "examples", "other_examples", steps=(2, 3),
        wrong=Program(dense, shuffled, resumed(shuffled, lambda: shuffled(1).skip(2))),
        right=Program(dense, shuffled, resumed(shuffled, lambda: shuffled().skip(2))),
    ),
    # After a resume, `skip_first_batches` skips in every later epoch, too.
    "resume_skips_every_epoch": Case(
        "huggingface/accelerate/issues/1451", "examples", "other_examples", steps=(2,),
        wrong=Program(
            dense, lambda: in_orders(0, 1), lambda _: in_orders(0).concatenate(in_orders(1).skip(1))
        ),
        right=Program(dense, lambda: in_orders(0, 1), lambda _: in_orders(0, 1)),
    ),
}  # fmt: skip


# --- Evaluations ---------------------------------------------------------------------------------


def thirteen() -> tf.data.Dataset:
    return regression_data(13)


def padded(strategy: tf.distribute.Strategy) -> tf.data.Dataset:
    examples = thirteen().unbatch()
    missing = examples.take(-13 % strategy.num_replicas_in_sync)
    return examples.concatenate(missing).batch(GLOBAL_BATCH_SIZE)


class LargestError(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="largest_error")
        self.largest = self.add_weight(name="largest", initializer="zeros")

    def update_state(self, y: tf.Tensor, y_pred: tf.Tensor, sample_weight: object = None) -> None:
        self.largest.assign(tf.maximum(self.largest.value, tf.reduce_max(tf.abs(y - y_pred))))

    def result(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.largest.value)


EVALUATIONS = {
    # `DistributedSampler` repeats the first examples until all processes have equally many.
    "padded_evaluation": Case(
        "pytorch/pytorch/issues/25162", "evaluation", "other_evaluation", num_replicas=3,
        wrong=Program(dense, evaluation_data=thirteen, distribute_evaluation=padded),
        right=Program(dense, evaluation_data=thirteen),
    ),
    # The state of a custom metric is added over the replicas, and a largest error is no sum.
    "metric_state": Case(
        "keras-team/keras/issues/21054", "evaluation", "other_metric",
        wrong=Program(
            lambda: dense(metrics=[LargestError()]), evaluation_data=regression_data
        ),
        right=Program(
            lambda: dense(metrics=[keras.metrics.MeanAbsoluteError()]),
            evaluation_data=regression_data,
        ),
    ),
}  # fmt: skip


# --- Random numbers and BatchNorm ----------------------------------------------------------------


class ReplicaDropout(layers.Layer):
    """Dropout whose seeds are derived from the replica's number."""

    def __init__(self, rate: float, seed: int):
        super().__init__()
        self.rate = rate
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training:
            return inputs
        seed = tf.cast(self.seed_generator.next(), "int32") + tf.stack([0, replica_id()])
        return tf.nn.experimental.stateless_dropout(inputs, self.rate, seed)


def image_data() -> tf.data.Dataset:
    generator = np.random.default_rng(0)
    images = generator.normal(size=(24, 8, 8, 3)).astype("float32")
    labels = generator.integers(0, 4, 24)
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(GLOBAL_BATCH_SIZE)


def convolutional(synchronized: bool) -> keras.Model:
    network = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(synchronized=synchronized),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4),
        ]
    )
    network.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return network


def normalised(synchronized: bool) -> keras.Model:
    return dense(layers.BatchNormalization(momentum=0.5, synchronized=synchronized))


class Unbiased(layers.BatchNormalization):
    def call(self, inputs: tf.Tensor, training: bool = False, mask: object = None) -> tf.Tensor:
        before = tf.identity(self.moving_variance.value)
        outputs = super().call(inputs, training=training, mask=mask)
        if training:
            count = tf.cast(tf.shape(inputs)[0], "float32")
            added = self.moving_variance.value - self.momentum * before
            self.moving_variance.assign_add(added / (count - 1))
        return outputs


def summed(layer: layers.Layer) -> keras.Model:
    loss = keras.losses.MeanSquaredError(reduction="sum")
    return dense(layer, layers.ReLU(), optimizer=optimizers.SGD(0.01), loss=loss)


def uneven() -> tf.data.Dataset:
    return regression_data(21)  # 6 and 6, 5 and 4.


LAYERS = {
    # Reported for DDP with one seed on all ranks. Keras under `MirroredStrategy` does it without
    # any seed of the user, since all replicas start from the same seed state.
    "equal_dropout": Case(
        "huggingface/transformers/issues/31412", "random numbers", "same_random_numbers",
        wrong=Program(lambda: dense(layers.Dropout(0.5, seed=1))),
        right=Program(lambda: dense(ReplicaDropout(0.5, seed=1))),
    ),
    # Documented and no bug, but with few examples for each replica another training.
    "local_batch_norm": Case(
        "tensorflow/tensorflow/issues/7439", "forward", "local_statistics", status="by design",
        wrong=Program(lambda: convolutional(synchronized=False), image_data),
        right=Program(lambda: convolutional(synchronized=True), image_data),
    ),
    # Each replica evaluates with statistics of its own examples; those of one replica are saved.
    "local_moving_statistics": Case(
        "tensorflow/tensorflow/issues/46488", "evaluation", "local_statistics", status="by design",
        also=(("forward", "local_statistics", "by design"),),
        wrong=Program(lambda: normalised(synchronized=False), evaluation_data=regression_data),
        right=Program(lambda: normalised(synchronized=True), evaluation_data=regression_data),
    ),
    # `SyncBatchNorm` corrects the moving variance by n / (n - 1) of a replica's own values.
    "sync_batch_norm_count": Case(
        "pytorch/pytorch/issues/22192", "statistics", "wrong_count", tensors="moving_variance",
        wrong=Program(lambda: summed(Unbiased(synchronized=True)), uneven),
        right=Program(lambda: summed(layers.BatchNormalization(synchronized=True)), uneven),
    ),
}  # fmt: skip

CASES = PIPELINES | EVALUATIONS | LAYERS
