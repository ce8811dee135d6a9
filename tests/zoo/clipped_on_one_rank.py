"""One rank clips its gradients, the others do not.

The clipping stands in a branch that only the first rank takes. The sum is neither clipped nor
unclipped, and its direction depends on the examples of that rank.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf
from small import compiled_dense, regression_data, replica_id

BUG = "deepspeedai/DeepSpeed#1801"
LINK = "https://github.com/deepspeedai/DeepSpeed/pull/1801"
STAGE = "clipping"
CAUSE = "clipped_on_one_replica"


class ClipsOnFirstRank(keras.optimizers.SGD):
    def _clip_gradients(self, grads: Sequence) -> Sequence:
        clipped = super()._clip_gradients(grads)
        is_first = replica_id() == 0
        return [tf.where(is_first, c, g) for c, g in zip(clipped, grads, strict=True)]


def model() -> keras.Model:
    return compiled_dense(ClipsOnFirstRank(0.1, clipnorm=0.05))


def corrected_model() -> keras.Model:
    return compiled_dense(keras.optimizers.SGD(0.1))


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)
