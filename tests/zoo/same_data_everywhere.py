"""Every worker reads the whole data set in the same order.

Reported for Horovod with `tf.data`, where no data set is sharded automatically: all workers compute
the gradient of the same batch, and only one part of the data is seen. `dataset.shard` is missing.
"""

import keras
import tensorflow as tf
from small import compiled_dense, one_pipeline_for_each_replica, regression_data

BUG = "horovod/horovod#223"
LINK = "https://github.com/horovod/horovod/issues/223"
STAGE = "examples"
CAUSE = "same_examples"
REPLICAS = (0, 1, 2)
NUM_REPLICAS = 3


def model() -> keras.Model:
    return compiled_dense()


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)


def distribute(
    strategy: tf.distribute.Strategy, global_batch_size: int
) -> tf.distribute.DistributedDataset:
    num_replicas = strategy.num_replicas_in_sync
    whole = regression_data(global_batch_size // num_replicas)
    return one_pipeline_for_each_replica(strategy, [whole] * num_replicas)


def corrected_distribute(
    strategy: tf.distribute.Strategy, global_batch_size: int
) -> tf.distribute.DistributedDataset:
    num_replicas = strategy.num_replicas_in_sync
    whole = regression_data(global_batch_size // num_replicas)
    shards = [whole.shard(num_replicas, replica) for replica in range(num_replicas)]
    return one_pipeline_for_each_replica(strategy, shards)
