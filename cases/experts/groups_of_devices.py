"""A token may choose experts on few devices only, by scores to which a bias is added.

id = "experts/groups_of_devices"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["deepseek-ai/DeepSeek-V3#741", "huggingface/transformers#45440"]
date = "2025-03"
tags = ["experts", "shard_map", "jit", "sgd"]

[wrong.experts_of_other_groups_have_score_of_zero]
title = "experts of other groups have a score of zero"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.experts_are_weighted_by_scores_with_bias]
title = "experts are weighted by scores with the bias"
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
EXPERTS, GROUPS, CHOSEN, WIDTH, BATCH = 8, 4, 3, 8, 20
RATE, MOMENTUM = 0.3, 0.9
SPECS = {"router": P(), "up": P("expert"), "down": P("expert"), "head": P()}
MESH = Mesh(np.array(jax.devices()), ("expert",))
# Learned without a gradient elsewhere; experts with much load have a lower one.
BIAS = np.float32([-1.4, -0.7, -1.1, -0.9, -0.6, -1.3, -0.8, -1.2])


def init():
    random = np.random.default_rng(9)
    shapes = {"router": (WIDTH, EXPERTS), "head": (WIDTH, 3)}
    shapes |= {"up": (EXPERTS, WIDTH, 10), "down": (EXPERTS, 10, WIDTH)}
    return {k: np.float32(random.normal(size=s) / np.sqrt(s[-2])) for k, s in shapes.items()}


def gates_of(scores):
    """Returns the weights of the best experts of the two best groups; 0 for all others."""
    biased = scores + BIAS
    groups = biased.reshape(-1, GROUPS, EXPERTS // GROUPS).sum(2)
    is_open = groups >= jax.lax.top_k(groups, 2)[0][:, 1:]
    is_open = jnp.repeat(is_open, EXPERTS // GROUPS, 1)
    closed = 0.0 if BUG == "experts_of_other_groups_have_score_of_zero" else -jnp.inf
    ranked = jnp.where(is_open, biased, closed)
    places = jax.lax.top_k(jax.lax.stop_gradient(ranked), CHOSEN)[1]
    is_chosen = jax.nn.one_hot(places, EXPERTS).sum(1)
    if BUG == "experts_are_weighted_by_scores_with_bias":
        scores = biased
    gates = scores * is_chosen
    return gates / gates.sum(1, keepdims=True)


def experts(x, gates, up, down):
    """Computes the own experts for all tokens, and adds up what all devices have."""
    own = gates.reshape(len(gates), DEVICES, -1)[:, jax.lax.axis_index("expert")]
    hidden = jax.nn.gelu(jnp.einsum("td,edh->teh", x, up))
    return jax.lax.psum(jnp.einsum("teh,ehd,te->td", hidden, down, own), "expert")


def loss_fn(params, x, y):
    gates = gates_of(jax.nn.sigmoid(x @ params["router"]))
    places = P(), P(), P("expert"), P("expert")
    layer = jax.shard_map(experts, mesh=MESH, in_specs=places, out_specs=P(), check_vma=False)
    x = x + layer(x, gates, params["up"], params["down"])
    outputs = harness.keep("y_pred", x @ params["head"])
    return jnp.mean(jax.nn.softplus(-y * outputs))


@jax.jit
def step(params, velocity, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = harness.keep("sums", grads)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    return jax.tree.map(lambda p, v: p - RATE * v, params, velocity), velocity, loss


def main():
    params = {
        name: jax.device_put(value, NamedSharding(MESH, SPECS[name]))
        for name, value in init().items()
    }
    velocity = jax.tree.map(jnp.zeros_like, params)
    random = np.random.default_rng(1)
    with harness.training(
        step,
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            x = np.float32(random.normal(size=(BATCH, WIDTH)))
            batch = jax.device_put((x, np.sign(x[:, :3] * x[:, 3:6])), NamedSharding(MESH, P()))
            params, velocity, _ = train_step(params, velocity, *batch)


if __name__ == "__main__":
    main()
