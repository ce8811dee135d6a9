"""Each rank lowers its learning rate when its own loss stops falling.

Reported for `ReduceLROnPlateau` in distributed training: it looks at the loss of its rank, not at
that of all. As soon as one rank lowers its rate, the copies of the weights are no longer the same.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf
from small import compiled_dense, regression_data, replica_id

BUG = "rmchurch/disruptcnn#3"
LINK = "https://github.com/rmchurch/disruptcnn/issues/3"
STAGE = "update"
CAUSE = "other_learning_rate"
REPLICAS = (1,)


class PlateauOnOneRank(keras.optimizers.SGD):
    """SGD whose second rank has seen a plateau."""

    def _backend_update_step(
        self, grads: Sequence, trainable_variables: Sequence, learning_rate: tf.Tensor
    ) -> None:
        lowered = tf.where(replica_id() == 1, 0.1 * learning_rate, learning_rate)
        super()._backend_update_step(grads, trainable_variables, lowered)


def model() -> keras.Model:
    return compiled_dense(PlateauOnOneRank(0.1))


def corrected_model() -> keras.Model:
    return compiled_dense(keras.optimizers.SGD(0.1))


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)
