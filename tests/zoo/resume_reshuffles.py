"""A run that is resumed within an epoch skips the first batches of another order.

Reported for a random sampler, whose state is not that of the interrupted epoch after the resume:
the right number of batches is skipped, but of an order that was never trained on. Some examples are
seen twice in the epoch, others never.
"""

import keras
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "huggingface/accelerate#2016"
LINK = "https://github.com/huggingface/accelerate/issues/2016"
STAGE = "examples"
CAUSE = "other_examples"
STEPS = (2, 3)
NUM_EXAMPLES, INTERRUPTED_AFTER = 48, 2


def model() -> keras.Model:
    return compiled_dense()


def in_order(seed: int, global_batch_size: int) -> tf.data.Dataset:
    examples = regression_data(NUM_EXAMPLES, NUM_EXAMPLES).unbatch()
    shuffled = examples.shuffle(NUM_EXAMPLES, seed=seed, reshuffle_each_iteration=False)
    return shuffled.batch(global_batch_size)


def data(global_batch_size: int) -> tf.data.Dataset:
    return in_order(0, global_batch_size)


def distribute(strategy: tf.distribute.Strategy, global_batch_size: int) -> tf.data.Dataset:
    first = in_order(0, global_batch_size).take(INTERRUPTED_AFTER)
    return first.concatenate(in_order(1, global_batch_size).skip(INTERRUPTED_AFTER))


def corrected_distribute(
    strategy: tf.distribute.Strategy, global_batch_size: int
) -> tf.data.Dataset:
    first = in_order(0, global_batch_size).take(INTERRUPTED_AFTER)
    return first.concatenate(in_order(0, global_batch_size).skip(INTERRUPTED_AFTER))
