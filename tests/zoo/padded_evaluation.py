"""The evaluation counts some examples twice, so that every replica gets equally many.

Reported for `DistributedSampler`, which repeats the first examples until their number is divisible
by that of the processes: loss and accuracy depend on the number of devices.
"""

import keras
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "pytorch/pytorch#25162"
LINK = "https://github.com/pytorch/pytorch/issues/25162"
STAGE = "evaluation"
CAUSE = "other_evaluation"
NUM_REPLICAS = 3
NUM_EXAMPLES = 13


def model() -> keras.Model:
    return compiled_dense()


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)


def evaluation_data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size, NUM_EXAMPLES)


def distribute_evaluation(
    strategy: tf.distribute.Strategy, global_batch_size: int
) -> tf.data.Dataset:
    examples = evaluation_data(global_batch_size).unbatch()
    num_missing = -NUM_EXAMPLES % strategy.num_replicas_in_sync
    return examples.concatenate(examples.take(num_missing)).batch(global_batch_size)


def corrected_distribute_evaluation(
    strategy: tf.distribute.Strategy, global_batch_size: int
) -> tf.data.Dataset:
    return evaluation_data(global_batch_size)
