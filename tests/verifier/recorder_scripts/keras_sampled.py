"""Trains a small model of Keras, recorded with samples: FILE [KIND] [BUG].

KIND: `plain` (a loop on one device), `loop` and `fit` on two, `workers` (a loop in two processes,
this one as TF_CONFIG says); `whole`, `full` and `killed`: fit on one device, recorded whole, to its
end, on a disk that is full, and killed in step 2.
"""

import os
import resource
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

from lockstep import record_keras

LATER = 11  # A row of the embedding of which the samples have no element.


def loss_of(labels, logits):
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def strategy_of(kind):
    if kind == "workers":
        return tf.distribute.MultiWorkerMirroredStrategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    number = 2 if kind in ("fit", "loop") else 1
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(number)])


def built(bug):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    # Rows of an embedding of which each example has several, whose gradients are sparse.
    parts = layers.Embedding(60, 8), layers.Flatten(), layers.Dense(41, "tanh"), layers.Dense(5)
    model = keras.Sequential([keras.Input((4,)), *parts])
    loss = (lambda y, logits: 1.01 * loss_of(y, logits)) if bug == "loss" else loss_of
    model.compile(keras.optimizers.AdamW(1e-2), loss)
    return model


def run_loop(strategy, model, bug, recorder, data):
    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / 64
        gradients = tape.gradient(loss, model.trainable_variables)
        if bug == "row":
            table = tf.convert_to_tensor(gradients[0])
            row = table[LATER : LATER + 1] * 1.01
            gradients[0] = tf.tensor_scatter_nd_update(table, [[LATER]], row)
        model.optimizer.apply(gradients, model.trainable_variables)

    step = recorder.wrap(replica_step)

    @tf.function
    def train(x, y):
        strategy.run(step, args=(x, y))

    if type(strategy) is tf.distribute.MirroredStrategy:
        data = strategy.experimental_distribute_dataset(data)
    for x, y in data:
        train(x, y)


def main(path, kind="plain", bug=""):
    strategy = strategy_of(kind)
    with strategy.scope():
        model = built(bug)
    x, y = np.random.default_rng(5).integers(0, 40, (64, 4)), np.arange(64) % 5
    if kind == "workers":
        own = strategy.cluster_resolver.task_id
        x, y = np.split(x, 2)[own], np.split(y, 2)[own]
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64).repeat(3)
    if kind == "full":  # A write beyond this fails as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    def begin(number, logs=None):
        if kind == "killed" and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    callback = keras.callbacks.LambdaCallback(on_train_batch_begin=begin)
    options = {"steps": 3} if kind in ("whole", "full", "killed") else {"sample": 16}
    with record_keras.record(path, model, **options) as recorder:
        if kind in ("plain", "loop", "workers"):
            run_loop(strategy, model, bug, recorder, data)
        else:
            model.fit(data, verbose=0, callbacks=[callback])
    print(repr(float(sum(np.sum(w.numpy(), dtype=np.float64) for w in model.weights))))


if __name__ == "__main__":
    main(*sys.argv[1:])
