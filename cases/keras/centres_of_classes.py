"""Centres of classes move by what all replicas together add, as a mean of what each one assigns.

id = "keras/centres_of_classes"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["tensorflow/addons#740", "leondgarse/Keras_insightface#3"]
date = "2020-01"
tags = ["mirrored", "loader", "averages", "sgd"]

[wrong.centres_move_by_mean_of_replicas]
title = "centres move by a mean of the replicas' moves"
place = { node = "update", step = 0, ranks = "all", tensors = ["centres*"] }

[wrong.centres_follow_first_replica]
title = "centres follow the first replica"
place = { node = "update", step = 0, ranks = "all", tensors = ["centres*"] }

[wrong.features_have_no_pull_to_centres]
title = "features have no pull to the centres"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, CLASSES, WIDTH = 16, 3, 8


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


class Centres(keras.layers.Layer):
    """Returns how far features are from the centres of their classes, which then move a little."""

    def build(self, shape):
        is_first = BUG == "centres_follow_first_replica"
        self.centres = self.add_weight(
            name="centres", shape=(CLASSES, shape[-1]), initializer="zeros", trainable=False,
            aggregation="only_first_replica" if is_first else "mean",
        )  # fmt: skip

    def call(self, features, labels):
        chosen = tf.one_hot(labels, CLASSES)
        ways = features - chosen @ self.centres.value
        move = tf.transpose(chosen) @ tf.stop_gradient(ways) / BATCH_SIZE
        if BUG != "centres_move_by_mean_of_replicas":
            move *= tf.distribute.get_strategy().num_replicas_in_sync
        self.centres.assign(self.centres + 0.5 * move)
        return tf.reduce_sum(tf.square(ways), -1)


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(33)
    random = np.random.default_rng(33)
    x = random.normal(size=(3 * BATCH_SIZE, 5)).astype("float32")
    x[np.arange(len(x)) % BATCH_SIZE < BATCH_SIZE // 2] += 0.5
    labels = x[:, :CLASSES].argmax(1).astype("int32")
    with strategy.scope():
        inputs, classes = keras.Input((5,)), keras.Input((), dtype="int32")
        features = keras.layers.Dense(WIDTH, "tanh")(inputs)
        logits = keras.layers.Dense(CLASSES)(features)
        model = keras.Model([inputs, classes], [logits, Centres(name="centres")(features, classes)])
        optimizer = keras.optimizers.SGD(0.3, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def step(x, labels):
        with tf.GradientTape() as tape:
            logits, ways = model([x, labels], training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            if BUG != "features_have_no_pull_to_centres":
                losses += 0.2 * ways
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(step)
        train_step = tf.function(lambda x, labels: strategy.run(recorded, args=(x, labels)))
        dataset = tf.data.Dataset.from_tensor_slices((x, labels)).batch(BATCH_SIZE)
        for batch in strategy.experimental_distribute_dataset(dataset):
            train_step(*batch)


if __name__ == "__main__":
    main()
