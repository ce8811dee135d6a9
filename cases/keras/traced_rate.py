"""Keras on JAX: a schedule reads the count of steps that was there when the step was traced.

id = "keras/traced_rate"
framework = "keras-jax"
processes = 2
steps = 3
mode = "pair"
references = ["keras-team/keras-core#213"]
date = "2023-05"
tags = ["jit", "sgd"]

[wrong.schedule_reads_variable_of_optimizer]
title = "the schedule reads the variable of the optimizer"
place = { node = "update", step = 1, ranks = "all", tensors = "all" }

[wrong.count_that_step_returns_is_dropped]
title = "the count that the step returns is dropped"
place = { node = "between", step = 0, ranks = "all", tensors = ["count"] }
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
BATCH_SIZE, MOMENTUM, EPOCHS = 20, 0.8, 3

schedule = keras.optimizers.schedules.CosineDecay(0.3, decay_steps=4, alpha=0.1)
iterations = keras.Variable(0, dtype="int32", trainable=False)
loss_of = keras.losses.Huber(delta=0.7)


def build_model():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6, 2))
    x = keras.layers.SeparableConv1D(12, 3, activation="swish")(inputs)
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.GlobalMaxPooling1D()(x)))


model = build_model()


def compute_loss(weights, x, y):
    outputs, _ = model.stateless_call(weights, [], x, training=True)
    return loss_of(y, harness.keep("y_pred", outputs))


@jax.jit
def step(weights, count, velocity, x, y):
    loss, grads = jax.value_and_grad(compute_loss)(weights, x, y)
    grads = harness.keep("sums", grads)
    is_variable = BUG == "schedule_reads_variable_of_optimizer"
    rate = schedule(iterations.value if is_variable else count)
    velocity = [MOMENTUM * v + g for v, g in zip(velocity, grads, strict=True)]
    weights = [w - rate * v for w, v in zip(weights, velocity, strict=True)]
    return weights, count + 1, velocity, loss


def main():
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    weights = [variable.value for variable in model.trainable_variables]
    state = weights, iterations.value, [0 * weight for weight in weights]
    state = jax.device_put(state, NamedSharding(mesh, P()))
    random = np.random.default_rng(5)
    places = {"params": 0, "opt_state": (1, 2)}
    with harness.training(
        step,
        {"class": "SGD", "learning_rate": schedule, "momentum": MOMENTUM},
        arguments=places | {"batch": (3, 4)},
        outputs=places | {"loss": 3},
    ) as train_step:
        for _ in range(EPOCHS):
            x = random.normal(size=(BATCH_SIZE, 6, 2)).astype(np.float32)
            batch = jax.device_put((x, x.max(1)), NamedSharding(mesh, P("batch")))
            weights, count, velocity, _ = train_step(*state, *batch)
            if BUG == "count_that_step_returns_is_dropped":
                count = state[1]
            state = weights, count, velocity


if __name__ == "__main__":
    main()
