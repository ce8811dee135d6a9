"""Features of two domains are drawn together by a discrepancy, which needs the whole batch.

id = "gathered/mean_discrepancy"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["jindongwang/transferlearning#223"]
date = "2021-04"
tags = ["shard_map", "jit", "gathered"]

[wrong.discrepancy_is_that_of_own_examples]
title = "the discrepancy is that of the own examples"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.bandwidth_is_that_of_own_examples]
title = "the bandwidth is that of the own examples"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.gathered_features_have_no_gradient]
title = "gathered features have no gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["in", "hidden"] }
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
WIDTH, BATCH, RATE, DECAY, EPSILON, WEIGHT = 10, 16, 0.02, 0.9, 1e-3, 2.0


def init():
    random = np.random.default_rng(5)
    shapes = {"in": (7, WIDTH), "hidden": (WIDTH, WIDTH), "out": (WIDTH, 1)}
    return {name: np.float32(random.normal(size=s) / np.sqrt(s[0])) for name, s in shapes.items()}


def squared_distances(a, b):
    return ((a[:, None] - b[None]) ** 2).sum(-1)


def discrepancy(source, target):
    """Returns the squared maximum mean discrepancy with a kernel of the mean distance."""
    both = jnp.concatenate([source, target])
    bandwidth = jax.lax.stop_gradient(squared_distances(both, both).mean())
    if BUG == "bandwidth_is_that_of_own_examples":
        own = both.reshape(2, DEVICES, -1, WIDTH)[:, jax.lax.axis_index("data")]
        own = own.reshape(-1, WIDTH)
        bandwidth = jax.lax.stop_gradient(squared_distances(own, own).mean())

    def kernel(a, b):
        return jnp.exp(-squared_distances(a, b) / bandwidth).mean()

    return kernel(source, source) + kernel(target, target) - 2 * kernel(source, target)


def gather(features):
    if BUG == "discrepancy_is_that_of_own_examples":
        return features
    everything = jax.lax.all_gather(features, "data", tiled=True)
    if BUG == "gathered_features_have_no_gradient":
        everything = jax.lax.stop_gradient(everything)
        start = jax.lax.axis_index("data") * len(features)
        return jax.lax.dynamic_update_slice_in_dim(everything, features, start, 0)
    return everything


def loss_fn(params, x, y, domain_x):
    def features_of(inputs):
        return jax.nn.celu(jax.nn.celu(inputs @ params["in"]) @ params["hidden"])

    source, target = features_of(x), features_of(domain_x)
    outputs = harness.keep("y_pred", source @ params["out"])
    loss = (jax.nn.softplus(outputs[:, 0]) - y * outputs[:, 0]).mean()
    return loss + WEIGHT * discrepancy(gather(source), gather(target))


def device_step(params, square, x, y, domain_x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y, domain_x)
    grads = harness.keep("raw", grads)
    grads = harness.keep("sums", jax.lax.pmean(grads, "data"))
    square = jax.tree.map(lambda s, g: DECAY * s + (1 - DECAY) * g * g, square, grads)
    params = jax.tree.map(
        lambda p, s, g: p - RATE * g / (jnp.sqrt(s) + EPSILON), params, square, grads
    )
    return params, square, jax.lax.pmean(loss, "data")


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    step = jax.shard_map(
        device_step,
        mesh=mesh,
        in_specs=(P(), P(), P("data"), P("data"), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    params = jax.device_put(init(), NamedSharding(mesh, P()))
    square = jax.tree.map(jnp.zeros_like, params)
    random = np.random.default_rng(1)
    with harness.training(
        jax.jit(step),
        {"class": "RMSprop", "learning_rate": RATE, "rho": DECAY, "epsilon": EPSILON},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3, 4)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            x, other = np.float32(random.normal(size=(2, BATCH, 7)))
            y = np.float32(x[:, 0] * x[:, 1] > 0)
            batch = jax.device_put((x, y, 0.7 * other + 0.5), NamedSharding(mesh, P("data")))
            params, square, _ = train_step(params, square, *batch)


if __name__ == "__main__":
    main()
