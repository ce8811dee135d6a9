"""A training in the style of Flax: nested parameters, BatchNorm statistics, a chain of updates.

`jax.pmap` runs the step on each device; parameters are replicated, batches have an axis of devices.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
BATCH_SIZE, NUM_STEPS, CLASSES = 16, 3, 3
LEARNING_RATE, DECAY, MAX_NORM, BN_MOMENTUM = 0.02, 0.1, 1.0, 0.9


class Model:
    """Dense, BatchNorm, ReLU, Dense, as `flax.linen` names their variables."""

    @staticmethod
    def init(random):
        def dense(size, features):
            kernel = random.normal(size=(size, features)) / np.sqrt(size)
            return {"kernel": np.float32(kernel), "bias": np.zeros(features, np.float32)}

        norm = {"scale": np.ones(12, np.float32), "bias": np.zeros(12, np.float32)}
        params = {"Dense_0": dense(6, 12), "BatchNorm_0": norm, "Dense_1": dense(12, CLASSES)}
        stats = {"mean": np.zeros(12, np.float32), "var": np.ones(12, np.float32)}
        return {"params": params, "batch_stats": {"BatchNorm_0": stats}}

    @staticmethod
    def apply(variables, x):
        params, stats = variables["params"], variables["batch_stats"]["BatchNorm_0"]
        x = x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
        mean, square = jax.lax.pmean((x.mean(0), (x * x).mean(0)), "batch")
        var = square - mean**2
        stats = {
            "mean": BN_MOMENTUM * stats["mean"] + (1 - BN_MOMENTUM) * mean,
            "var": BN_MOMENTUM * stats["var"] + (1 - BN_MOMENTUM) * var,
        }
        x = (x - mean) / jnp.sqrt(var + 1e-5)
        x = x * params["BatchNorm_0"]["scale"] + params["BatchNorm_0"]["bias"]
        x = jax.nn.softplus(x) @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]
        return x, {"batch_stats": {"BatchNorm_0": stats}}


def adamw(grads, state, params):
    count = state["count"] + 1
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
    nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["nu"], grads)

    def update(p, m, v):
        step = m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8)
        return p - LEARNING_RATE * (step + DECAY * p)

    return jax.tree.map(update, params, mu, nu), {"count": count, "mu": mu, "nu": nu}


def cross_entropy_loss(logits, labels):
    one_hot = jax.nn.one_hot(labels, CLASSES)
    return -jnp.mean(jnp.sum(one_hot * jax.nn.log_softmax(logits), axis=-1))


def train_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state["batch_stats"]}
        logits, new_model_state = Model.apply(variables, batch["image"])
        loss = cross_entropy_loss(logits, batch["label"])
        return loss, (new_model_state, logits)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (new_model_state, logits)), grads = grad_fn(state["params"])
    loss = harness.keep("loss", loss)
    grads = harness.keep("raw", grads)
    grads = jax.lax.pmean(grads, axis_name="batch")
    grads = harness.keep("sums", grads)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, MAX_NORM / norm), grads)
    grads = harness.keep("clipped", grads)
    params, opt_state = adamw(grads, state["opt_state"], state["params"])
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
    metrics = jax.lax.pmean({"loss": loss, "accuracy": accuracy}, axis_name="batch")
    return {"params": params, "opt_state": opt_state, **new_model_state}, metrics


def batches():
    random = np.random.default_rng(3)
    for _ in range(NUM_STEPS):
        image = random.normal(size=(BATCH_SIZE, 6)).astype(np.float32)
        yield {"image": image, "label": image[:, :CLASSES].argmax(1)}


def main():
    variables = Model.init(np.random.default_rng(0))
    zeros = jax.tree.map(np.zeros_like, variables["params"])
    opt_state = {"count": np.zeros((), np.int32), "mu": zeros, "nu": zeros}
    state = {**variables, "opt_state": opt_state}
    state = jax.tree.map(lambda x: np.stack([x] * DEVICES), state)
    p_train_step = jax.pmap(train_step, axis_name="batch")
    places = {"params": "0/params", "state": "0/batch_stats", "opt_state": "0/opt_state"}
    settings = {
        "class": "AdamW",
        "learning_rate": LEARNING_RATE,
        "weight_decay": DECAY,
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-8,
    }
    with harness.training(
        p_train_step,
        settings,
        arguments=places | {"batch": 1},
        outputs=places | {"loss": "1/loss"},
        pmap=True,
    ) as p_train_step:
        for batch in batches():
            batch = jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)
            state, _ = p_train_step(state, batch)


if __name__ == "__main__":
    main()
