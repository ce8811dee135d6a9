"""Each of the two losses of a GAN needs the division that the optimizers do not make.

reference = "keras-team/keras#15509"
date = "2021-10"
framework = "keras"

[wrong]
"the generator's loss is a mean over its replica" = ["sum_instead_of_mean", "scaled_gradient"]
"both losses are divided by the replicas once more" = ["scaled_gradient", "mean_instead_of_sum"]
"""

import os

import keras
import numpy as np
import tensorflow as tf

import lockstep

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, NOISE = 12, 5


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def network(sizes):
    layers = [keras.layers.Dense(size, "leaky_relu") for size in sizes[1:-1]]
    return keras.Sequential([keras.Input((sizes[0],)), *layers, keras.layers.Dense(sizes[-1])])


class Trainer:
    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.generator = network([NOISE, 12, 6])
            self.critic = network([6, 12, 12, 1])
            self.both = keras.Sequential([self.generator, self.critic])
            self.optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2, momentum=0.5)]
        self.cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)

    def mean(self, losses):
        loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        return (
            loss / DEVICES if BUG == "both losses are divided by the replicas once more" else loss
        )

    def step(self, real, noise):
        with tf.GradientTape(persistent=True) as tape:
            false = self.generator(noise, training=True)
            of_real, of_false = self.critic(real, training=True), self.critic(false, training=True)
            ones, zeros = tf.ones_like(of_real), tf.zeros_like(of_false)
            critic_losses = self.cross_entropy(ones, of_real) + self.cross_entropy(zeros, of_false)
            critic_loss = self.mean(critic_losses)
            generator_losses = self.cross_entropy(ones, of_false)
            if BUG == "the generator's loss is a mean over its replica":
                generator_loss = tf.reduce_mean(generator_losses)
            else:
                generator_loss = self.mean(generator_losses)
        pairs = [(generator_loss, self.generator), (critic_loss, self.critic)]
        for optimizer, (loss, model) in zip(self.optimizers, pairs, strict=True):
            optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )

    def fit(self, dataset):
        with lockstep.record(self.both, self.optimizers) as recorder:
            recorded = recorder.wrap(self.step)
            run = tf.function(lambda real, noise: self.strategy.run(recorded, args=(real, noise)))
            for real, noise in self.strategy.experimental_distribute_dataset(dataset):
                run(real, noise)


keras.utils.set_random_seed(1)
random = np.random.default_rng(0)
real = np.tanh(random.normal(1, 1, size=(2 * BATCH_SIZE, 6))).astype("float32")
noise = random.normal(size=(2 * BATCH_SIZE, NOISE)).astype("float32")
Trainer(make_strategy()).fit(tf.data.Dataset.from_tensor_slices((real, noise)).batch(BATCH_SIZE))
