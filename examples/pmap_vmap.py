"""Computes the gradients of two shards with `jax.vmap` on one device and with `jax.pmap` on two.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python examples/pmap_vmap.py

It needs JAX and NumPy. `docs/exercises.md` explains what it prints.
"""

import jax
import numpy as np


def gradients(params, images, labels):
    """Returns the gradients of a shard's mean loss, and their mean over all shards."""

    def loss(params):
        hidden = jax.nn.relu(images @ params[0])
        log_probabilities = jax.nn.log_softmax(hidden @ params[1])
        return -(log_probabilities * jax.nn.one_hot(labels, 10)).sum(axis=1).mean()

    of_shard = jax.grad(loss)(params)
    return of_shard, jax.lax.pmean(of_shard, "shards")


random = np.random.default_rng(0)
params = [random.normal(0, 0.05, s).astype(np.float32) for s in [(784, 128), (128, 10)]]
images, labels = random.random((2, 128, 784), np.float32), random.integers(0, 10, (2, 128))
results = {}
for name, transform in {"vmap": jax.vmap, "pmap": jax.pmap}.items():
    step = transform(gradients, axis_name="shards", in_axes=(None, 0, 0))
    step = jax.jit(step) if name == "vmap" else step  # pmap compiles on its own.
    results[name] = jax.tree.leaves(step(params, images, labels))
    devices = results[name][0].sharding.device_set
    print(f"{name}: gradients on {len(devices)} of {jax.device_count()} devices")
for name, a, b in zip(("shards", "mean"), *(r[::2] for r in results.values()), strict=True):
    same, apart = np.mean(np.array(a) == np.array(b)), np.abs(np.array(a) - np.array(b)).max()
    print(f"{name}: {same:.0%} of the elements bitwise equal, at most {apart:.1g} apart")
