"""Every worker of the input pipeline augments with the same random numbers.

Reported for data loaders whose workers inherit the state of NumPy's generator: the n-th batch of
each worker gets the same noise, crops and flips, so that there is much less variety than it seems.
Here, the pipelines of two replicas start with the same seed.
"""

import keras
import numpy as np
import tensorflow as tf
from small import compiled_dense, one_pipeline_for_each_replica, regression_arrays

BUG = "pytorch/pytorch#5059"
LINK = "https://github.com/pytorch/pytorch/issues/5059"
STAGE = "examples"
CAUSE = "other_examples"
NUM_EXAMPLES = 24


def model() -> keras.Model:
    return compiled_dense()


def augmented(seed: int, num_examples: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.3, (num_examples, 6)).astype("float32")


def data(global_batch_size: int) -> tf.data.Dataset:
    return with_noise_of(seeds=(0, 1), per_replica_batch_size=global_batch_size // 2)[-1]


def with_noise_of(seeds: tuple, per_replica_batch_size: int) -> list[tf.data.Dataset]:
    """Returns the pipeline of each replica, and that of the global batches that they make up."""
    x, y = regression_arrays(NUM_EXAMPLES)
    size, shards = per_replica_batch_size, []
    for replica, seed in enumerate(seeds):
        rows = (np.arange(NUM_EXAMPLES) // size) % len(seeds) == replica
        noise = augmented(seed, int(rows.sum()))
        shards.append((x[rows] + noise, y[rows]))
    whole = [np.stack(parts, 1) for parts in zip(*shards, strict=True)]
    whole = [array.reshape(-1, size, 2, array.shape[-1]).swapaxes(1, 2) for array in whole]
    whole = [array.reshape(-1, array.shape[-1]) for array in whole]
    pairs = [(shard, size) for shard in shards] + [(tuple(whole), 2 * size)]
    return [tf.data.Dataset.from_tensor_slices(arrays).batch(n) for arrays, n in pairs]


def distribute(
    strategy: tf.distribute.Strategy, global_batch_size: int
) -> tf.distribute.DistributedDataset:
    pipelines = with_noise_of(seeds=(0, 0), per_replica_batch_size=global_batch_size // 2)
    return one_pipeline_for_each_replica(strategy, pipelines[:-1])


def corrected_distribute(
    strategy: tf.distribute.Strategy, global_batch_size: int
) -> tf.distribute.DistributedDataset:
    pipelines = with_noise_of(seeds=(0, 1), per_replica_batch_size=global_batch_size // 2)
    return one_pipeline_for_each_replica(strategy, pipelines[:-1])
