"""Keras: a generator is trained through its critic; files of both models have the critic twice.

id = "resume/separate_models"
framework = "keras"
processes = 2
steps = 4
mode = "resume"
references = ["keras-team/keras#10806", "keras-team/tf-keras#70"]
date = "2021-11"
tags = ["mirrored", "loader", "sgd"]

[wrong.critic_is_loaded_from_file_of_its_own]
title = "the critic is loaded from a file of its own"
place = { node = "update", step = 2, ranks = "all", tensors = ["critic.*"] }

[wrong.optimizers_start_again]
title = "optimizers start again"
place = { node = "start", step = 2, ranks = "all", tensors = "all" }

[wrong.critic_optimizer_starts_again]
title = "the critic's optimizer starts again"
place = { node = "start", step = 2, ranks = "all", tensors = ["critic.*"] }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
DEVICES = int(os.environ.get("DEVICES", 1))
STEPS, HALF, BATCH_SIZE, NOISE, SIZE = 4, 2, 12, 4, 6


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def network(sizes):
    hidden = [keras.layers.Dense(size, "gelu") for size in sizes[1:-1]]
    return keras.Sequential([keras.Input(sizes[:1]), *hidden, keras.layers.Dense(sizes[-1])])


class Trainer:
    def __init__(self):
        if LOAD:
            self.both = keras.saving.load_model(LOAD + "_both.keras", compile=False)
        else:
            self.both = keras.Sequential([network([NOISE, 10, SIZE]), network([SIZE, 14, 1])])
        self.generator, self.critic = self.both.layers
        if LOAD and BUG == "critic_is_loaded_from_file_of_its_own":
            self.critic = keras.saving.load_model(LOAD + "_critic.keras", compile=False)
        self.optimizers = [
            keras.optimizers.RMSprop(0.02, epsilon=1e-3),
            keras.optimizers.SGD(0.2, momentum=0.8),
        ]
        for optimizer, model in zip(self.optimizers, (self.generator, self.critic), strict=True):
            optimizer.build(model.trainable_variables)
        if LOAD:
            self.load_optimizers()

    def save(self):
        self.both.save(SAVE + "_both.keras")
        self.critic.save(SAVE + "_critic.keras")
        for number, optimizer in enumerate(self.optimizers):
            values = {str(i): np.array(value) for i, value in enumerate(optimizer.variables)}
            np.savez(f"{SAVE}_{number}.npz", **values)

    def load_optimizers(self):
        for number, optimizer in enumerate(self.optimizers):
            is_lost = BUG == "critic_optimizer_starts_again" and number == 1
            if is_lost or BUG == "optimizers_start_again":
                continue
            with np.load(f"{LOAD}_{number}.npz") as file:
                for i, variable in enumerate(optimizer.variables):
                    variable.assign(file[str(i)])

    def step(self, real, noise):
        def mean(losses):
            return tf.nn.compute_average_loss(losses[:, 0], global_batch_size=BATCH_SIZE)

        with tf.GradientTape(persistent=True) as tape:
            of_real = self.critic(real, training=True)
            of_false = self.critic(self.generator(noise, training=True), training=True)
            critic_loss = mean(tf.nn.relu(1 - of_real) ** 2 + tf.nn.relu(1 + of_false) ** 2)
            generator_loss = mean(-self.both(noise, training=True))
        pairs = (generator_loss, self.generator), (critic_loss, self.critic)
        for optimizer, (loss, model) in zip(self.optimizers, pairs, strict=True):
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(29)
    random = np.random.default_rng(30)
    real = np.tanh(random.normal(0.5, 1, size=(STEPS * BATCH_SIZE, SIZE))).astype("float32")
    noise = random.normal(size=(STEPS * BATCH_SIZE, NOISE)).astype("float32")
    with strategy.scope():
        trainer = Trainer()
    own = slice(HALF * BATCH_SIZE if LOAD else 0, HALF * BATCH_SIZE if SAVE else len(real))
    models = [trainer.generator, trainer.critic]
    with harness.training(models, trainer.optimizers) as recorder:
        recorded = recorder.wrap(trainer.step)
        run = tf.function(lambda real, noise: strategy.run(recorded, args=(real, noise)))
        dataset = tf.data.Dataset.from_tensor_slices((real[own], noise[own])).batch(BATCH_SIZE)
        for real_part, noise_part in strategy.experimental_distribute_dataset(dataset):
            run(real_part, noise_part)
    if SAVE:
        trainer.save()


if __name__ == "__main__":
    main()
