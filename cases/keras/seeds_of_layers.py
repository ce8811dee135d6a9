"""Keras on JAX: layers that draw have seeds as state, which a step takes and returns.

id = "keras/seeds_of_layers"
framework = "keras-jax"
processes = 2
steps = 3
mode = "pair"
references = ["keras-team/keras-core#650"]
date = "2023-08"
tags = ["jit", "random", "sgd"]

[wrong.seeds_that_step_returns_are_dropped]
title = "seeds that a step returns are dropped"
place = { node = "between", step = 0, ranks = "all", tensors = ["seeds"] }

[wrong.layers_do_not_draw]
title = "layers do not draw"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["dropout", "noise"] }
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
BATCH_SIZE, RATE, MOMENTUM = 16, 0.2, 0.9


def build_model():
    keras.utils.set_random_seed(35)
    inputs = keras.Input((6,))
    x = keras.layers.GaussianNoise(0.3, seed=4, name="noise")(inputs)
    x = keras.layers.Dense(20, "silu")(x)
    x = keras.layers.Dropout(0.4, seed=5, name="dropout")(x)
    return keras.Model(inputs, keras.layers.Dense(2)(x))


model = build_model()


def compute_loss(weights, seeds, x, y):
    training = BUG != "layers_do_not_draw"
    outputs, seeds = model.stateless_call(weights, seeds, x, training=training)
    return jnp.square(harness.keep("y_pred", outputs) - y).mean(), seeds


@jax.jit
def step(weights, seeds, velocity, x, y):
    compute = jax.value_and_grad(compute_loss, has_aux=True)
    (loss, seeds), grads = compute(weights, seeds, x, y)
    grads = harness.keep("sums", grads)
    velocity = [MOMENTUM * v + g for v, g in zip(velocity, grads, strict=True)]
    weights = [w - RATE * v for w, v in zip(weights, velocity, strict=True)]
    return weights, seeds, velocity, loss


def main():
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    weights = [variable.value for variable in model.trainable_variables]
    seeds = [variable.value for variable in model.non_trainable_variables]
    state = weights, seeds, [0 * weight for weight in weights]
    state = jax.device_put(state, NamedSharding(mesh, P()))
    random = np.random.default_rng(35)
    places = {"params": 0, "opt_state": (1, 2)}
    with harness.training(
        step,
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments=places | {"batch": (3, 4)},
        outputs=places | {"loss": 3},
    ) as train_step:
        for _ in range(3):
            x = random.normal(size=(BATCH_SIZE, 6)).astype(np.float32)
            batch = jax.device_put((x, np.sin(x[:, :2])), NamedSharding(mesh, P("batch")))
            weights, seeds, velocity, _ = train_step(*state, *batch)
            if BUG == "seeds_that_step_returns_are_dropped":
                seeds = state[1]
            state = weights, seeds, velocity


if __name__ == "__main__":
    main()
