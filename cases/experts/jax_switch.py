"""A switch layer in `shard_map`: the load-balancing loss is computed on each device.

id = "experts/jax_switch"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["AI-Hypercomputer/maxtext#860", "NVIDIA-NeMo/Automodel#1408"]
date = "2024-08"
tags = ["experts", "shard_map", "jit", "sgd"]

[wrong.density_of_device_tokens]
title = "density of the device's tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.balancing_loss_is_added_once_per_device]
title = "the balancing loss is added once per device"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.balancing_loss_has_no_gradient]
title = "the balancing loss has no gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["router"] }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
EXPERTS, WIDTH, CLASSES, BATCH, RATE = 4, 8, 3, 24, 0.5


def init_params():
    random = np.random.default_rng(0)
    shapes = {"router": (WIDTH, EXPERTS), "experts": (EXPERTS, WIDTH, 16)}
    shapes |= {"down": (EXPERTS, 16, WIDTH), "head": (WIDTH, CLASSES)}
    return {k: np.float32(random.normal(size=s) / np.sqrt(s[-2])) for k, s in shapes.items()}


def balance(probs, mask):
    density, proxy = mask.mean(0), probs.mean(0)
    if BUG != "density_of_device_tokens":
        density = jax.lax.pmean(density, "data")
    loss = EXPERTS * (density * proxy).sum()
    if BUG == "balancing_loss_is_added_once_per_device":
        loss = DEVICES * loss
    return jax.lax.stop_gradient(loss) if BUG == "balancing_loss_has_no_gradient" else loss


def loss_fn(params, x, labels):
    probs = jax.nn.softmax(x @ params["router"])
    mask = jax.nn.one_hot(probs.argmax(-1), EXPERTS)
    hidden = jax.nn.relu(jnp.einsum("td,edh->teh", x, params["experts"]))
    y = jnp.einsum("teh,ehd,te->td", hidden, params["down"], mask * probs)
    log_probs = jax.nn.log_softmax(harness.keep("y_pred", (x + y) @ params["head"]))
    loss = -jnp.take_along_axis(log_probs, labels[:, None], 1).mean()
    return loss + balance(probs, mask)


def step(params, x, labels):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, labels)
    loss, grads = harness.keep("loss", loss), harness.keep("raw", grads)
    grads = harness.keep("sums", jax.lax.pmean(grads, "data"))
    params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    return params, jax.lax.pmean(loss, "data")


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": (P(), P())}
    train_step = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))
    places = {"arguments": {"params": 0, "batch": (1, 2)}, "outputs": {"params": 0, "loss": 1}}
    optimizer = {"class": "SGD", "learning_rate": RATE}
    params, random = init_params(), np.random.default_rng(1)
    with harness.training(train_step, optimizer, **places) as train_step:
        for _ in range(2):
            x = random.normal(size=(BATCH, WIDTH)).astype(np.float32)
            params, _ = train_step(params, x, x[:, :CLASSES].argmax(1))


main()
