"""A table is split by words and tokens by places: its gradient is summed, and then cut, not before.

id = "jax/rows_before_sum"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["openxla/xla#42481"]
date = "2026-05"
tags = ["shard_map", "jit", "gathered"]

[wrong.rows_are_cut_out_before_sum]
title = "rows are cut out before the sum"
place = { node = "sum", step = 0, ranks = "all", tensors = ["table"] }

[wrong.only_own_tokens_reach_own_rows]
title = "only own tokens reach the own rows"
place = { node = "sum", step = 0, ranks = "all", tensors = ["table"] }
"""

import functools
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
WORDS, WIDTH, LENGTH, BATCH, RATE, DECAY, EPSILON = 12, 8, 10, 4, 0.03, 0.9, 1e-3
SPECS = {"table": P("tp"), "mix": P(), "bias": P(), "head": P()}


def own_rows(table):
    size = WORDS // DEVICES
    return jax.lax.dynamic_slice_in_dim(table, jax.lax.axis_index("tp") * size, size)


@jax.custom_vjp
def take(rows, tokens):
    """Returns the embeddings of the own tokens, for which it gathers all rows."""
    return jax.lax.all_gather(rows, "tp", tiled=True)[tokens]


def take_forward(rows, tokens):
    return take(rows, tokens), tokens


def take_backward(tokens, gradient):
    whole = jnp.zeros((WORDS, WIDTH)).at[tokens].add(gradient)
    if BUG == "rows_are_cut_out_before_sum":
        rows = jax.lax.psum(own_rows(whole), "tp")  # Row i of each device is another word.
    elif BUG == "only_own_tokens_reach_own_rows":
        rows = own_rows(whole)
    else:
        rows = own_rows(jax.lax.psum(whole, "tp"))
    return rows, None


take.defvjp(take_forward, take_backward)


def loss_fn(params, tokens, targets):
    x = take(params["table"], tokens)
    x = x + jax.nn.elu(x @ params["mix"] + params["bias"])
    logits = harness.keep("y_pred", x @ params["head"], P(None, "tp"))
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], 2)
    return losses.sum() / (BATCH * LENGTH)


def device_step(params, square, tokens, targets):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens, targets)
    grads |= {name: jax.lax.psum(grads[name], "tp") for name in ("mix", "bias", "head")}
    grads = harness.keep("sums", grads, SPECS)
    square = jax.tree.map(lambda s, g: DECAY * s + (1 - DECAY) * g * g, square, grads)

    def update(p, s, g):
        return p - RATE * g / (jnp.sqrt(s) + EPSILON)

    return jax.tree.map(update, params, square, grads), square, jax.lax.psum(loss, "tp")


def main():
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    random = np.random.default_rng(3)
    shapes = {"table": (WORDS, WIDTH), "mix": (WIDTH, WIDTH), "bias": (WIDTH,)}
    shapes["head"] = WIDTH, WORDS
    params = {name: np.float32(random.normal(size=s) / 2) for name, s in shapes.items()}
    places = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = jax.device_put(params, places)
    square = jax.tree.map(jnp.zeros_like, params)
    step = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(SPECS, SPECS, P(None, "tp"), P(None, "tp")),
        out_specs=(SPECS, SPECS, P()),
        check_vma=False,
    )(device_step)
    with harness.training(
        jax.jit(step),
        {"class": "RMSprop", "learning_rate": RATE, "rho": DECAY, "epsilon": EPSILON},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            text = random.integers(WORDS, size=(BATCH, LENGTH + 1)).astype(np.int32)
            batch = text[:, :-1], text[:, 1:]
            batch = jax.device_put(batch, NamedSharding(mesh, P(None, "tp")))
            params, square, _ = train_step(params, square, *batch)


if __name__ == "__main__":
    main()
