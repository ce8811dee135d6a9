"""Each of the two losses of a GAN needs the division that the optimizers do not make.

id = "keras/two_optimizers"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#15509"]
date = "2021-10"
tags = ["mirrored", "loader", "sgd"]

[wrong.generator_loss_is_mean_over_its_replica]
title = "the generator's loss is a mean over its replica"
place = { node = "loss", step = 0, ranks = "all", tensors = ["generator.*"] }

[wrong.both_losses_are_divided_by_replicas_once]
title = "both losses are divided by the replicas once more"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

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
        return loss / DEVICES if BUG == "both_losses_are_divided_by_replicas_once" else loss

    def step(self, real, noise):
        with tf.GradientTape(persistent=True) as tape:
            false = self.generator(noise, training=True)
            of_real, of_false = self.critic(real, training=True), self.critic(false, training=True)
            ones, zeros = tf.ones_like(of_real), tf.zeros_like(of_false)
            critic_losses = self.cross_entropy(ones, of_real) + self.cross_entropy(zeros, of_false)
            critic_loss = self.mean(critic_losses)
            generator_losses = self.cross_entropy(ones, of_false)
            if BUG == "generator_loss_is_mean_over_its_replica":
                generator_loss = tf.reduce_mean(generator_losses)
            else:
                generator_loss = self.mean(generator_losses)
        pairs = [(generator_loss, self.generator), (critic_loss, self.critic)]
        for optimizer, (loss, model) in zip(self.optimizers, pairs, strict=True):
            optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )

    def fit(self, dataset):
        with harness.training(self.both, self.optimizers) as recorder:
            recorded = recorder.wrap(self.step)
            run = tf.function(lambda real, noise: self.strategy.run(recorded, args=(real, noise)))
            for real, noise in self.strategy.experimental_distribute_dataset(dataset):
                run(real, noise)


keras.utils.set_random_seed(1)
random = np.random.default_rng(0)
real = np.tanh(random.normal(1, 1, size=(2 * BATCH_SIZE, 6))).astype("float32")
noise = random.normal(size=(2 * BATCH_SIZE, NOISE)).astype("float32")
Trainer(make_strategy()).fit(tf.data.Dataset.from_tensor_slices((real, noise)).batch(BATCH_SIZE))
