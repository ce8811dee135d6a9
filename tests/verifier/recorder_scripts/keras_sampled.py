"""Trains a small model of Keras, recorded with samples: FILE [KIND] [BUG] [REPLAY].

KIND: `plain` (on one device), `loop` (on two), `workers` (in two processes), `large`.
"""

import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

from lockstep import record_keras

LATER = 11  # A row of the embedding of which the samples have no element.


def built(kind, bug):
    """Returns a compiled model under a strategy of as many devices as the kind says."""
    if kind == "workers":
        addresses = [f"localhost:{int(os.environ['MASTER_PORT']) + index}" for index in range(2)]
        task = {"type": "worker", "index": int(os.environ["RANK"])}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )
        number = 2 if kind == "loop" else 1
        strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(number)])
    keras.utils.set_random_seed(int(bug == "other_start"))
    layers = keras.layers
    with strategy.scope():
        # Rows of an embedding of which each example has several, whose gradients are sparse.
        table = layers.Embedding(2_200_000 if kind == "large" else 60, 8)
        parts = [table, layers.Flatten(), layers.Dense(41, "tanh"), layers.Dense(5)]
        model = keras.Sequential([keras.Input((4,)), *parts])
        model.compile(keras.optimizers.AdamW(1e-2))
    return strategy, model


def replica_step(model, bug, x, y):
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
        loss = tf.reduce_sum(losses) / 64
    gradients = tape.gradient(loss, model.trainable_variables)
    if bug == "row":
        table = tf.convert_to_tensor(gradients[0])
        row = table[LATER : LATER + 1] * 1.01
        gradients[0] = tf.tensor_scatter_nd_update(table, [[LATER]], row)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def main(path, kind="plain", bug="", replay=None):
    strategy, model = built(kind, bug)
    random = np.random.default_rng(5)
    x, y = random.integers(0, 40, (64, 4)), np.arange(64) % 5
    if kind == "workers":
        own = strategy.cluster_resolver.task_id
        x, y = np.split(x, 2)[own], np.split(y, 2)[own]
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64).repeat(3)
    options = {"sample": 16, "start": bug == "start", "replay": replay}
    with record_keras.record(path, model, **({} if kind == "large" else options)) as recorder:
        step = recorder.wrap(lambda x, y: replica_step(model, bug, x, y))
        train = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
        if kind != "workers":
            data = strategy.experimental_distribute_dataset(data)
        for x, y in data:
            train(x, y)


if __name__ == "__main__":
    main(*sys.argv[1:])
