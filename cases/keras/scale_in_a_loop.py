"""Keras on JAX: a custom loop scales its loss for an optimizer that takes the scale out again.

id = "keras/scale_in_a_loop"
framework = "keras-jax"
processes = 2
steps = 4
mode = "pair"
references = ["keras-team/keras#19244", "keras-team/keras#19479", "keras-team/keras#20894"]
date = "2024-03"
tags = ["jit", "sgd"]

[wrong.loss_is_not_scaled]
title = "the loss is not scaled"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.scale_is_one_that_was_there_at_tracing]
title = "the scale is the one that was there at the tracing"
place = { node = "loss", step = 2, ranks = "all", tensors = "all" }
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
BATCH_SIZE, STEPS, RATE, MOMENTUM, SCALE = 16, 4, 0.2, 0.9, 64.0


def build_model():
    keras.utils.set_random_seed(31)
    inputs = keras.Input((6, 6, 1))
    x = keras.layers.DepthwiseConv2D(3, depth_multiplier=4, activation="softsign")(inputs)
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x)))


model = build_model()
inner = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
optimizer = keras.optimizers.LossScaleOptimizer(inner, SCALE, dynamic_growth_steps=2)
optimizer.build(model.trainable_variables)
loss_of = keras.losses.CategoricalHinge()


def scaled(loss, state):
    """Multiplies by the scale, which the optimizer doubles after every second step."""
    if BUG == "loss_is_not_scaled":
        return loss
    if BUG == "scale_is_one_that_was_there_at_tracing":
        return optimizer.scale_loss(loss)
    with keras.StatelessScope(zip(optimizer.variables, state, strict=True)):
        return optimizer.scale_loss(loss)


def compute_loss(weights, state, x, y):
    outputs, _ = model.stateless_call(weights, [], x, training=True)
    loss = loss_of(y, harness.keep("y_pred", outputs))
    return scaled(loss, state), loss


@jax.jit
def step(weights, state, x, y):
    (_, loss), grads = jax.value_and_grad(compute_loss, has_aux=True)(weights, state, x, y)
    grads = harness.keep("sums", grads)
    weights, state = optimizer.stateless_apply(state, grads, weights)
    return weights, state, loss


def main():
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    values = [[v.value for v in each] for each in (model.trainable_variables, optimizer.variables)]
    weights, state = jax.device_put(values, NamedSharding(mesh, P()))
    random = np.random.default_rng(9)
    with harness.training(
        step,
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(STEPS):
            x = random.normal(size=(BATCH_SIZE, 6, 6, 1)).astype(np.float32)
            labels = np.float32(np.eye(3)[x.reshape(BATCH_SIZE, 3, 12).sum(2).argmax(1)])
            batch = jax.device_put((x, labels), NamedSharding(mesh, P("batch")))
            weights, state, _ = train_step(weights, state, *batch)


if __name__ == "__main__":
    main()
