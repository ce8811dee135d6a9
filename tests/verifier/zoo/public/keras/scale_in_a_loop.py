"""Keras on JAX: a custom loop scales its loss for an optimizer that takes the scale out again.

reference = "keras-team/keras#19244, keras-team/keras#19479, keras-team/keras#20894"
date = "2024-03"
framework = "keras-jax"
steps = 4

[wrong]
"the loss is not scaled" = ["scaled_gradient", "other_loss_scale"]
"the scale is the one that was there at the tracing" = ["scaled_gradient", "other_loss_scale"]
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lockstep
from lockstep import record_jax

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
    if BUG == "the loss is not scaled":
        return loss
    if BUG == "the scale is the one that was there at the tracing":
        return optimizer.scale_loss(loss)
    with keras.StatelessScope(zip(optimizer.variables, state, strict=True)):
        return optimizer.scale_loss(loss)


def compute_loss(weights, state, x, y):
    outputs, _ = model.stateless_call(weights, [], x, training=True)
    loss = loss_of(y, record_jax.keep("y_pred", outputs))
    return scaled(loss, state), loss


@jax.jit
def step(weights, state, x, y):
    (_, loss), grads = jax.value_and_grad(compute_loss, has_aux=True)(weights, state, x, y)
    grads = record_jax.keep("sums", grads)
    weights, state = optimizer.stateless_apply(state, grads, weights)
    return weights, state, loss


def main():
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    values = [[v.value for v in each] for each in (model.trainable_variables, optimizer.variables)]
    weights, state = jax.device_put(values, NamedSharding(mesh, P()))
    random = np.random.default_rng(9)
    with lockstep.record(
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
