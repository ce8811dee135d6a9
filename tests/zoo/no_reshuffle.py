"""The second epoch comes in the order of the first one.

Reported for `DistributedSampler`: without `set_epoch`, its order depends only on its seed, so that
every epoch has the same batches. One device shuffles again before each epoch.
"""

import keras
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "pytorch/pytorch#31771"
LINK = "https://github.com/pytorch/pytorch/issues/31771"
STAGE = "examples"
CAUSE = "other_examples"
STEPS = (2, 3)
NUM_EXAMPLES, NUM_EPOCHS = 24, 2


def model() -> keras.Model:
    return compiled_dense()


def epochs_of(orders: list[int], global_batch_size: int) -> tf.data.Dataset:
    """Returns one epoch for each number, which is the seed of its order."""
    examples = regression_data(NUM_EXAMPLES).unbatch()
    epochs = [
        examples.shuffle(NUM_EXAMPLES, seed=order, reshuffle_each_iteration=False)
        for order in orders
    ]
    whole = epochs[0]
    for epoch in epochs[1:]:
        whole = whole.concatenate(epoch)
    return whole.batch(global_batch_size)


def data(global_batch_size: int) -> tf.data.Dataset:
    return epochs_of(list(range(NUM_EPOCHS)), global_batch_size)


def distribute(strategy: tf.distribute.Strategy, global_batch_size: int) -> tf.data.Dataset:
    return epochs_of([0] * NUM_EPOCHS, global_batch_size)


def corrected_distribute(
    strategy: tf.distribute.Strategy, global_batch_size: int
) -> tf.data.Dataset:
    return epochs_of(list(range(NUM_EPOCHS)), global_batch_size)
