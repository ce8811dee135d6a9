"""Two views of an image are compared with the views that the own replica has, or with constants.

id = "gathered/replica_negatives"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["tensorflow/similarity#258", "facebookresearch/vissl#123"]
date = "2022-05"
tags = ["mirrored", "loader", "gathered", "adam"]

[wrong.negatives_of_own_replica]
title = "negatives of the own replica"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.gathered_views_have_no_gradient]
title = "gathered views have no gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, STEPS, TEMPERATURE = 8, 2, 0.5


def make_strategy():
    if DEVICES == 1:
        return tf.distribute.get_strategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(DEVICES)])


def build_encoder():
    layers = keras.layers
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(6, 3, strides=2, activation="relu")(inputs)
    x = layers.Dense(16, "relu")(layers.Flatten()(x))
    return keras.Model(inputs, layers.UnitNormalization()(layers.Dense(8)(x)))


def gathered(views, replicas):
    """Returns the views of all replicas, and the index of the first own one."""
    if DEVICES == 1 or BUG == "negatives_of_own_replica":
        return views, 0
    everything = replicas.all_gather(views, axis=0)
    if BUG == "gathered_views_have_no_gradient":
        everything = tf.stop_gradient(everything)
    return everything, replicas.replica_id_in_sync_group * tf.shape(views)[0]


def contrast(anchors, others, first):
    """Returns the sum over anchors; number `first` of the others belongs to anchor 0."""
    labels = first + tf.range(tf.shape(anchors)[0])
    logits = tf.matmul(anchors, others, transpose_b=True) / TEMPERATURE
    return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


keras.utils.set_random_seed(1)
strategy = make_strategy()
with strategy.scope():
    model = build_encoder()
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-4)
    optimizer.build(model.trainable_variables)


def replica_step(x, y):
    replicas = tf.distribute.get_replica_context()
    with tf.GradientTape() as tape:
        a, b = model(x, training=True), model(y, training=True)
        all_a, first = gathered(a, replicas)
        all_b, _ = gathered(b, replicas)
        loss = (contrast(a, all_b, first) + contrast(b, all_a, first)) / (2 * BATCH_SIZE)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


random = np.random.default_rng(2)
images = random.normal(size=(BATCH_SIZE * STEPS, 8, 8, 1)).astype("float32")
noise = 0.3 * random.normal(size=images.shape).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((images, images + noise)).batch(BATCH_SIZE)
with harness.training(model, optimizer) as recorder:
    recorded_step = recorder.wrap(replica_step)

    @tf.function
    def train_step(batch):
        return strategy.run(recorded_step, args=batch)

    for batch in strategy.experimental_distribute_dataset(dataset):
        train_step(batch)
