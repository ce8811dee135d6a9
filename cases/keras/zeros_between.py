"""Gradients are accumulated, and until all are there the optimizer gets zeros, which move weights.

id = "keras/zeros_between"
framework = "keras"
processes = 2
steps = 3
mode = "pair"
references = ["keras-team/tf-keras#301", "keras-team/keras#16633"]
date = "2024-03"
tags = ["accumulation", "mirrored", "loader", "recurrent", "embedding", "sgd"]

[wrong.zeros_are_applied_for_first_micro_batch]
title = "zeros are applied for the first micro-batch"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }

[wrong.each_micro_batch_counts_as_update]
title = "each micro-batch counts as an update"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, MICRO_BATCHES, LENGTH, WORDS = 24, 2, 5, 10


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def build_model():
    """Classifies a text by a recurrent layer."""
    return keras.Sequential([
        keras.Input((LENGTH,), dtype="int32"),
        keras.layers.Embedding(WORDS, 6, embeddings_initializer="glorot_normal"),
        keras.layers.SimpleRNN(10),
        keras.layers.Dense(3),
    ])  # fmt: skip


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(12)
    text = np.random.default_rng(4).integers(WORDS, size=(3 * BATCH_SIZE, LENGTH))
    labels = text.sum(1) % 3
    with strategy.scope():
        model = build_model()
        rate = keras.optimizers.schedules.PolynomialDecay(0.5, 5, 0.05)
        optimizer = keras.optimizers.SGD(rate, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def gradients_of(text, labels):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                labels, model(text, training=True), from_logits=True
            )
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        gradients = tape.gradient(loss, model.trainable_variables)
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    def replica_step(text, labels):
        weights = model.trainable_variables
        total = [tf.zeros_like(weight) for weight in weights]
        texts, targets = tf.split(text, MICRO_BATCHES), tf.split(labels, MICRO_BATCHES)
        for number in range(MICRO_BATCHES):
            found = gradients_of(texts[number], targets[number])
            total = [a + b for a, b in zip(total, found, strict=True)]
            if number == MICRO_BATCHES - 1:
                optimizer.apply(total, weights)
            elif BUG == "zeros_are_applied_for_first_micro_batch":
                optimizer.apply([tf.zeros_like(gradient) for gradient in total], weights)
            elif BUG == "each_micro_batch_counts_as_update":
                optimizer.iterations.assign_add(1)

    dataset = tf.data.Dataset.from_tensor_slices((text, labels)).batch(BATCH_SIZE)
    with harness.training(model, optimizer) as recorder:
        recorded = recorder.wrap(replica_step)
        train_step = tf.function(lambda x, y: strategy.run(recorded, args=(x, y)))
        for batch in strategy.experimental_distribute_dataset(dataset):
            train_step(*batch)


if __name__ == "__main__":
    main()
