"""A run that was interrupted within an epoch starts that epoch's data from the beginning.

Reported for checkpoints without the position in the data: after the resume, the first batches are
seen a second time and the last ones never. Here, the run is interrupted after two steps of four.
"""

import keras
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "huggingface/accelerate#685"
LINK = "https://github.com/huggingface/accelerate/issues/685"
STAGE = "examples"
CAUSE = "other_examples"
STEPS = (2, 3)
INTERRUPTED_AFTER = 2


def model() -> keras.Model:
    return compiled_dense()


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size, 4 * global_batch_size)


def distribute(strategy: tf.distribute.Strategy, global_batch_size: int) -> tf.data.Dataset:
    first = data(global_batch_size).take(INTERRUPTED_AFTER)
    resumed = data(global_batch_size).take(INTERRUPTED_AFTER)
    return first.concatenate(resumed)


def corrected_distribute(
    strategy: tf.distribute.Strategy, global_batch_size: int
) -> tf.data.Dataset:
    first = data(global_batch_size).take(INTERRUPTED_AFTER)
    resumed = data(global_batch_size).skip(INTERRUPTED_AFTER)
    return first.concatenate(resumed)
