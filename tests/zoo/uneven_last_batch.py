"""The last batch is not divisible by the number of replicas.

Reported with NaN for losses that divide by the number of examples of a replica, when a replica gets
none; where it gets fewer than the others, nothing is reported: the mean of the replicas' means is
not the mean over the examples, and the last step of each epoch is another one.
"""

import keras
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "tensorflow/tensorflow#36224"
LINK = "https://github.com/tensorflow/tensorflow/issues/36224"
STAGE = "loss"
CAUSE = "mean_of_means"
STEPS = (2,)


def model() -> keras.Model:
    return compiled_dense()


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size, 2 * global_batch_size + 5)


def corrected_data(global_batch_size: int) -> tf.data.Dataset:
    batches = data(global_batch_size).unbatch()
    return batches.batch(global_batch_size, drop_remainder=True)
