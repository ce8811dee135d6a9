"""Every replica trains a separate network: gradients are not summed at all.

Reported for Keras 3 under `MirroredStrategy`, where the optimizer applied each replica's gradients
to that replica's copy of the weights. Nothing fails; the copies drift apart, and all replicas but
the first one work for nothing.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "keras-team/keras#19891"
LINK = "https://github.com/keras-team/keras/issues/19891"
STAGE = "all-reduce"
CAUSE = "not_all_reduced"
REPLICAS = (0, 1)


class LocalSGD(keras.optimizers.SGD):
    """SGD as in the first versions of Keras 3."""

    def _all_reduce_sum_gradients(self, grads_and_vars: Sequence) -> Sequence:
        return grads_and_vars


def model() -> keras.Model:
    return compiled_dense(LocalSGD(0.1))


def corrected_model() -> keras.Model:
    return compiled_dense(keras.optimizers.SGD(0.1))


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)
