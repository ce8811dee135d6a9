"""After a resume, the batches that were done are skipped in every later epoch, too.

Reported for `skip_first_batches`: the data loader that skips stays in place after the epoch that
was interrupted. Here, the run was interrupted after the first of two batches.
"""

import keras
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "huggingface/accelerate#1451"
LINK = "https://github.com/huggingface/accelerate/issues/1451"
STAGE = "examples"
CAUSE = "other_examples"
STEPS = (2,)
NUM_DONE = 1


def model() -> keras.Model:
    return compiled_dense()


def epoch(number: int, global_batch_size: int) -> tf.data.Dataset:
    examples = regression_data(global_batch_size).unbatch()
    shuffled = examples.shuffle(24, seed=number, reshuffle_each_iteration=False)
    return shuffled.batch(global_batch_size)


def data(global_batch_size: int) -> tf.data.Dataset:
    return epoch(0, global_batch_size).concatenate(epoch(1, global_batch_size))


def distribute(strategy: tf.distribute.Strategy, global_batch_size: int) -> tf.data.Dataset:
    return epoch(0, global_batch_size).concatenate(epoch(1, global_batch_size).skip(NUM_DONE))


def corrected_distribute(
    strategy: tf.distribute.Strategy, global_batch_size: int
) -> tf.data.Dataset:
    return data(global_batch_size)
