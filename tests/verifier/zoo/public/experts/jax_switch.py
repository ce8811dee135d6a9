"""A switch layer in `shard_map`: the load-balancing loss is computed on each device.

reference = "AI-Hypercomputer/maxtext#860, NVIDIA-NeMo/Automodel#1408"
date = "2024-08"
framework = "jax"

[wrong]
"density of the device's tokens" = ["not_a_sum_over_examples", "other_loss", "mixes_examples"]
"the balancing loss is added once per device" = ["regulariser_repeated", "other_loss"]
"the balancing loss has no gradient" = ["regulariser_missing", "other_loss"]
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lockstep
from lockstep import record_jax

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
    if BUG != "density of the device's tokens":
        density = jax.lax.pmean(density, "data")
    loss = EXPERTS * (density * proxy).sum()
    if BUG == "the balancing loss is added once per device":
        loss = DEVICES * loss
    return jax.lax.stop_gradient(loss) if BUG == "the balancing loss has no gradient" else loss


def loss_fn(params, x, labels):
    probs = jax.nn.softmax(x @ params["router"])
    mask = jax.nn.one_hot(probs.argmax(-1), EXPERTS)
    hidden = jax.nn.relu(jnp.einsum("td,edh->teh", x, params["experts"]))
    y = jnp.einsum("teh,ehd,te->td", hidden, params["down"], mask * probs)
    log_probs = jax.nn.log_softmax(record_jax.keep("y_pred", (x + y) @ params["head"]))
    loss = -jnp.take_along_axis(log_probs, labels[:, None], 1).mean()
    return loss + balance(probs, mask)


def step(params, x, labels):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, labels)
    loss, grads = record_jax.keep("loss", loss), record_jax.keep("raw", grads)
    grads = record_jax.keep("sums", jax.lax.pmean(grads, "data"))
    params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    return params, jax.lax.pmean(loss, "data")


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": (P(), P())}
    train_step = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))
    places = {"arguments": {"params": 0, "batch": (1, 2)}, "outputs": {"params": 0, "loss": 1}}
    optimizer = {"class": "SGD", "learning_rate": RATE}
    params, random = init_params(), np.random.default_rng(1)
    with lockstep.record(train_step, optimizer, **places) as train_step:
        for _ in range(2):
            x = random.normal(size=(BATCH, WIDTH)).astype(np.float32)
            params, _ = train_step(params, x, x[:, :CLASSES].argmax(1))


main()
