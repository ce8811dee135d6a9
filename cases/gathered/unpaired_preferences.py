"""Answers are judged one by one, against a divergence that is estimated from the whole batch.

id = "gathered/unpaired_preferences"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/trl#1402", "ContextualAI/HALOs#4"]
date = "2024-01"
tags = ["shard_map", "jit", "adam"]

[wrong.divergence_is_that_of_own_answers]
title = "the divergence is that of the own answers"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.divergence_has_gradient]
title = "the divergence has a gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }
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
FEATURES, LENGTH, WORDS, BATCH, BETA = 6, 4, 7, 16, 1.5
SETTINGS = {"class": "Adam", "learning_rate": 0.05, "epsilon": 1e-4}


def init(random):
    shapes = {"in": (FEATURES, 16), "bias": (16,), "out": (16, LENGTH * WORDS)}
    return {k: np.float32(random.normal(size=s) / np.sqrt(s[0])) for k, s in shapes.items()}


def log_probs(params, prompts):
    hidden = jnp.tanh(prompts @ params["in"] + params["bias"])
    return jax.nn.log_softmax((hidden @ params["out"]).reshape(-1, LENGTH, WORDS))


def ratio(logs, reference, answers):
    """Returns how much likelier the policy finds answers than the reference does."""
    return jnp.take_along_axis(logs - reference, answers[..., None], 2)[..., 0].sum(1)


def loss_fn(params, reference, batch):
    """Returns the own part of the loss."""
    logs = harness.keep("y_pred", log_probs(params, batch["prompt"]), P("data"))
    reference = log_probs(reference, batch["prompt"])
    estimate = ratio(logs, reference, batch["answer of another"]).mean()
    if BUG != "divergence_has_gradient":
        estimate = jax.lax.stop_gradient(estimate)
    if BUG != "divergence_is_that_of_own_answers":
        estimate = jax.lax.pmean(estimate, "data")
    reward = ratio(logs, reference, batch["answer"]) - jnp.maximum(estimate, 0)
    return (1 - jax.nn.sigmoid(BETA * batch["verdict"] * reward)).sum() / BATCH


def device_step(params, moments, reference, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, reference, batch)
    grads = harness.keep("sums", jax.lax.psum(grads, "data"))
    count = moments["count"] + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments["first"], grads)
    second = jax.tree.map(lambda m, g: 0.999 * m + 0.001 * g * g, moments["second"], grads)

    def update(weight, m, v):
        m, v = m / (1 - 0.9**count), v / (1 - 0.999**count)
        return weight - 0.05 * m / (jnp.sqrt(v) + 1e-4)

    params = jax.tree.map(update, params, first, second)
    moments = {"count": count, "first": first, "second": second}
    return params, moments, jax.lax.psum(loss, "data")


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    random = np.random.default_rng(12)
    reference, params = (jax.device_put(init(random), NamedSharding(mesh, P())) for _ in range(2))
    zeros = jax.tree.map(jnp.zeros_like, params)
    moments = {"count": jnp.float32(0), "first": zeros, "second": zeros}
    step = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )(device_step)
    with harness.training(
        jax.jit(step),
        SETTINGS,
        arguments={"params": 0, "opt_state": 1, "batch": 3},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            prompts = np.float32(random.normal(size=(BATCH, FEATURES)))
            likely = np.array(log_probs(params, prompts)).argmax(2)  # As the policy answers.
            answers = np.where(random.random((BATCH, LENGTH)) < 0.8, likely, 0).astype(np.int32)
            batch = {
                "prompt": prompts,
                "answer": random.integers(WORDS, size=(BATCH, LENGTH)).astype(np.int32),
                "answer of another": answers,
                "verdict": np.float32(np.where(prompts[:, 0] > 0, 1, -1)),
            }
            batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
            params, moments, _ = train_step(params, moments, reference, batch)


if __name__ == "__main__":
    main()
