"""A noisy gate chooses among experts on all devices, beside one that every token has.

id = "experts/shared_and_noisy"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["divyamakkar0/JAXformer#21", "yfzhang114/SliME#3"]
date = "2024-07"
tags = ["experts", "jit", "sgd"]

[wrong.shared_expert_is_not_added]
title = "the shared expert is not added"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.noise_has_weights_of_gate]
title = "the noise has the weights of the gate"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
EXPERTS, WIDTH, CLASSES, BATCH, RATE, MOMENTUM = 4, 10, 5, 24, 0.3, 0.9
SPECS = {"inner": P("expert"), "outer": P("expert")}


def init():
    random = np.random.default_rng(8)
    shapes = {"gate": (WIDTH, EXPERTS), "noise": (WIDTH, EXPERTS), "head": (WIDTH, CLASSES)}
    shapes |= {"inner": (EXPERTS, WIDTH, 12), "outer": (EXPERTS, 12, WIDTH)}
    shapes |= {"shared_inner": (WIDTH, 12), "shared_outer": (12, WIDTH)}
    return {k: np.float32(random.normal(size=s) / np.sqrt(s[-2])) for k, s in shapes.items()}


def gates(params, x, noise):
    """Returns weights of the two best experts for each token, and zeros for the others."""
    weights = params["gate"] if BUG == "noise_has_weights_of_gate" else params["noise"]
    logits = x @ params["gate"] + noise * jax.nn.softplus(x @ weights)
    second = jax.lax.top_k(logits, 2)[0][:, 1:]
    return jax.nn.softmax(jnp.where(logits >= second, logits, -jnp.inf))


def loss_fn(params, x, noise, labels):
    hidden = jax.nn.gelu(jnp.einsum("td,edh->teh", x, params["inner"]))
    y = jnp.einsum("teh,ehd,te->td", hidden, params["outer"], gates(params, x, noise))
    if BUG != "shared_expert_is_not_added":
        y = y + jax.nn.gelu(x @ params["shared_inner"]) @ params["shared_outer"]
    logits = harness.keep("y_pred", (x + y) @ params["head"])
    right = jnp.take_along_axis(logits, labels[:, None], 1)
    return jnp.maximum(0, 1 + logits - right).mean()  # Of several classes, without a softmax.


@jax.jit
def step(params, velocity, x, noise, labels):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, noise, labels)
    grads = harness.keep("sums", grads)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v, g: p - RATE * (g + MOMENTUM * v), params, velocity, grads)
    return params, velocity, loss


def main():
    mesh = Mesh(np.array(jax.devices()), ("expert",))
    params = {
        name: jax.device_put(value, NamedSharding(mesh, SPECS.get(name, P())))
        for name, value in init().items()
    }
    velocity = jax.tree.map(jnp.zeros_like, params)
    random = np.random.default_rng(2)
    with harness.training(
        step,
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM, "nesterov": True},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3, 4)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            x = np.float32(random.normal(size=(BATCH, WIDTH)))
            noise = np.float32(random.normal(size=(BATCH, EXPERTS)))
            batch = jax.device_put((x, noise, x[:, :CLASSES].argmax(1)), NamedSharding(mesh, P()))
            params, velocity, _ = train_step(params, velocity, *batch)


if __name__ == "__main__":
    main()
