"""A bucket of gradients is read before the new sum has arrived in it.

Reported for ZeRO-2 with `overlap_comm`, where the norm of the gradients changed with the overlap:
the update takes some gradients from the step before. Here it is the bucket of one layer, from the
second step on.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "deepspeedai/DeepSpeed#5294"
LINK = "https://github.com/deepspeedai/DeepSpeed/issues/5294"
STAGE = "all-reduce"
CAUSE = "stale_gradient"
TENSORS = "hidden/kernel"
STEPS = (1, 2)


class OverlapsTooFar(keras.optimizers.SGD):
    def build(self, variables: Sequence) -> None:
        super().build(variables)
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.bucket = tf.Variable(tf.zeros((6, 8)), trainable=False, aggregation=first)

    def _all_reduce_sum_gradients(self, grads_and_vars: Sequence) -> Sequence:
        (gradient, variable), *others = super()._all_reduce_sum_gradients(grads_and_vars)
        if tf.distribute.get_replica_context().num_replicas_in_sync > 1:
            stale = tf.where(tf.equal(self.iterations.value, 0), gradient, self.bucket)
            self.bucket.assign(gradient)
            gradient = stale
        return [(gradient, variable), *others]


def model() -> keras.Model:
    return compiled_dense(OverlapsTooFar(0.1))


def corrected_model() -> keras.Model:
    return compiled_dense(keras.optimizers.SGD(0.1))


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size, 3 * global_batch_size)
