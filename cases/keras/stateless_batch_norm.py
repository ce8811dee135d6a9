"""A loop with stateless_call on JAX leaves out training=True, and what BatchNorm returns.

id = "keras/stateless_batch_norm"
framework = "keras-jax"
processes = 2
steps = 2
mode = "pair"
references = [
    "keras-team/keras#20378",
    "keras-team/keras-io: guides/distributed_training_with_jax.py",
]
date = "2024-10"
tags = ["batch_norm", "jit", "sgd"]

[wrong.training_true_is_left_out]
title = "training=True is left out"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["part_norm"] }

[wrong.moving_statistics_that_are_returned_are_left]
title = "the moving statistics that are returned are left out"
place = { node = "update", step = 0, ranks = "all", tensors = [
    "part_norm/moving_mean",
    "part_norm/moving_variance",
] }

[wrong.each_device_part_is_normalised_on_its_own]
title = "each device's part is normalised on its own"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["part_norm"] }
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
BATCH_SIZE, RATE, MOMENTUM = 16, 0.1, 0.9


class PartNorm(keras.layers.BatchNormalization):
    """BatchNorm, or a norm of each device's part of the batch with the same variables."""

    def call(self, x, training=None):
        if BUG != "each_device_part_is_normalised_on_its_own" or not training:
            return super().call(x, training=training)
        parts = [super(PartNorm, self).call(part, training=True) for part in jnp.split(x, DEVICES)]
        return jnp.concatenate(parts)


def build_model():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    x = PartNorm(momentum=0.9)(keras.layers.Dense(12)(inputs))
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Activation("softplus")(x)))


model = build_model()
optimizer = keras.optimizers.SGD(RATE, MOMENTUM)
optimizer.build(model.trainable_variables)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compute_loss(trainable, others, x, y):
    training = BUG != "training_true_is_left_out"
    logits, others = model.stateless_call(trainable, others, x, training=training)
    return cross_entropy(y, harness.keep("y_pred", logits)), others


@jax.jit
def step(state, x, y):
    trainable, others, slots = state
    compute = jax.value_and_grad(compute_loss, has_aux=True)
    (loss, new_others), grads = compute(trainable, others, x, y)
    if BUG != "moving_statistics_that_are_returned_are_left":
        others = new_others
    grads = harness.keep("sums", grads)
    trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
    return (trainable, others, slots), loss


def main():
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    state = tuple([variable.value for variable in group] for group in groups)
    state = jax.device_put(state, NamedSharding(mesh, P()))
    random = np.random.default_rng(0)
    places = {"params": "0/0", "state": "0/1", "opt_state": "0/2"}
    with harness.training(
        step,
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments=places | {"batch": (1, 2)},
        outputs=places | {"loss": 1},
    ) as train_step:
        for _ in range(2):
            x = random.normal(size=(BATCH_SIZE, 6)).astype(np.float32)
            x[BATCH_SIZE // 2 :] += 0.8
            batch = jax.device_put((x, x[:, :3].argmax(1)), NamedSharding(mesh, P("batch")))
            state, _ = train_step(state, *batch)


if __name__ == "__main__":
    main()
