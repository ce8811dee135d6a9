"""Dropout draws the same mask on every replica.

Reported for DDP with one seed on all ranks, as a loss of accuracy: the n-th example of each replica
loses the same units. Keras under `MirroredStrategy` does it without any seed of the user, since all
replicas start from the same seed state. The corrected twin derives a replica's seeds from its id.
"""

import keras
import tensorflow as tf
from small import dense_layers, regression_data, replica_id

BUG = "huggingface/transformers#31412"
LINK = "https://github.com/huggingface/transformers/issues/31412"
STAGE = "random numbers"
CAUSE = "same_random_numbers"


class ReplicaDropout(keras.layers.Layer):
    """Dropout with different seeds on each replica."""

    def __init__(self, rate: float, seed: int):
        super().__init__()
        self.rate = rate
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training:
            return inputs
        seed = tf.cast(self.seed_generator.next(), "int32") + tf.stack([0, replica_id()])
        return tf.nn.experimental.stateless_dropout(inputs, self.rate, seed)


def with_dropout(layer: keras.layers.Layer) -> keras.Model:
    network = keras.Sequential(dense_layers(layer), name="network")
    network.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    return network


def model() -> keras.Model:
    return with_dropout(keras.layers.Dropout(0.5, seed=1))


def corrected_model() -> keras.Model:
    return with_dropout(ReplicaDropout(0.5, seed=1))


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)
