"""The custom training loop of TensorFlow's guide, with MirroredStrategy on logical CPU devices."""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

DEVICES = int(os.environ.get("DEVICES", 1))
GLOBAL_BATCH_SIZE, EPOCHS = 12, 2


def create_model():
    keras.utils.set_random_seed(1)
    regularizer = keras.regularizers.L2(1e-2)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", kernel_regularizer=regularizer, name="hidden"),
            keras.layers.Dense(3, name="logits"),
        ]
    )


def create_dataset():
    random = np.random.default_rng(0)
    x = random.normal(size=(33, 6)).astype("float32")
    y = x[:, :3].argmax(1)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return dataset.shuffle(33, seed=2).batch(GLOBAL_BATCH_SIZE)


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES
    )
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    dataset = strategy.experimental_distribute_dataset(create_dataset())
    with strategy.scope():
        model = create_model()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def compute_loss(labels, predictions):
        per_example_loss = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example_loss, global_batch_size=batch_size)
        return loss + tf.nn.scale_regularization_loss(tf.add_n(model.losses))

    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    with harness.training(model, optimizer) as recorder:
        wrapped_step = recorder.wrap(replica_step)

        @tf.function
        def train_step(images, labels):
            losses = strategy.run(wrapped_step, args=(images, labels))
            return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

        for _ in range(EPOCHS):
            for images, labels in dataset:
                local = strategy.experimental_local_results(labels)
                batch_size = sum(len(part) for part in local)
                train_step(images, labels)


if __name__ == "__main__":
    main()
