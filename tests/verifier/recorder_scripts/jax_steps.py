"""Steps of JAX and their loops, which the cases of `jax_cases.py` record."""

import collections
import os
import pathlib
import re
from functools import partial

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true"
)

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from lockstep import record_jax

WITHOUT_KEY = {"params": 0, "opt_state": 1, "batch": (2, 3)}
ARGUMENTS = {**WITHOUT_KEY, "key": 4}
OUTPUTS = {"params": 0, "opt_state": 1, "loss": 2}
SGD = {"class": "SGD", "learning_rate": 0.1, "momentum": 0.9}
State = collections.namedtuple("State", "params moments batch_stats")


def init():
    random = np.random.default_rng(0)
    a, b = random.normal(size=(5, 7)), random.normal(size=(7, 2))
    params = {"a": {"kernel": a, "bias": np.zeros(7)}, "b": {"kernel": b}}
    return jax.tree.map(np.float32, params)


def zeros(params=None):
    return jax.tree.map(np.zeros_like, init() if params is None else params)


def batch(step):
    x = np.random.default_rng(step).normal(size=(8 if step < 4 else 4, 5)).astype(np.float32)
    return x, x[:, :2]


def mesh_of(num_devices, axis="d"):
    return Mesh(np.array(jax.devices()[:num_devices]), (axis,))


def loss_of(params, x, y, key, noise):
    """Returns the loss of two linear layers with noise between them."""
    a, b = params["a"], params["b"]["kernel"]
    scale = 1 + noise * jax.random.normal(key, a["bias"].shape)
    return (((x @ a["kernel"] + a["bias"]) * scale @ b - y) ** 2).sum() / len(x) / 2


def update(params, velocity, grads):
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
    return jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity


def adam(params, state, grads):
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
    nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["nu"], grads)
    count = state["count"] + 1
    first, second = 1 - 0.9**count, 1 - 0.999**count

    def applied(p, m, v):
        return p - 0.01 * ((m / first) / ((v / second) ** 0.5 + 1e-8)).astype(np.float32)

    return jax.tree.map(applied, params, mu, nu), {"mu": mu, "nu": nu, "count": count}


def start_of_adam(params):
    return {"mu": zeros(params), "nu": zeros(params), "count": np.int32(0)}


# --- Steps ---------------------------------------------------------------------------------------


def step_of_device(params, velocity, x, y, key, noise=0.5):
    loss, grads = jax.value_and_grad(loss_of)(params, x, y, key, noise)
    loss, grads = record_jax.keep("loss", loss), record_jax.keep("raw", grads)
    grads = record_jax.keep("sums", jax.lax.pmean(grads, "d"))
    clipped = record_jax.keep("clipped", jax.tree.map(lambda g: g.clip(-0.5, 0.5), grads))
    return *update(params, velocity, clipped), jax.lax.pmean(loss, "d")


pmap_step = jax.pmap(step_of_device, axis_name="d", donate_argnums=(0, 1))


def shard_map_step(num_devices, noise=0.5, traces=None):
    specs = {"in_specs": (P(), P(), P("d"), P("d"), P()), "out_specs": P()}

    @partial(jax.jit, donate_argnums=(0, 1))
    @partial(jax.shard_map, mesh=mesh_of(num_devices), check_vma=False, **specs)
    def step(params, velocity, x, y, key):
        if traces is not None:
            traces.append(x.shape)
        key = record_jax.keep("random", jax.random.fold_in(key, jax.lax.axis_index("d")))
        return step_of_device(params, velocity, x, y, key, noise)

    return step


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def jit_step(name, state, examples, *, key):
    """Trains with Adam; the state is one object, the batch a dictionary, the key a keyword."""
    params, moments, stats = state
    loss, grads = jax.value_and_grad(loss_of)(params, examples["x"], examples["y"], key, 0.5)
    params, moments = adam(params, moments, record_jax.keep("sums", grads))
    stats = {"mean": 0.9 * stats["mean"] + 0.1 * examples["x"].mean(0)}
    return State(params, moments, stats), {"loss": loss}


# --- Loops ---------------------------------------------------------------------------------------


def leaves_of(*trees):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trees)]


def loop(step, stack=0, end=6):
    """Trains for six steps, the last two with short batches; returns all arrays."""
    params, velocity = init(), zeros()
    if stack:
        params, velocity = jax.tree.map(lambda a: np.stack([a] * stack), (params, velocity))
    for number in range(end):
        x, y = batch(number)
        key = jax.random.key(number)
        if stack:
            x, y = (a.reshape(stack, -1, *a.shape[1:]) for a in (x, y))
            key = jax.random.split(key, stack)
        params, velocity, loss = step(params, velocity, x, y, key)
    return leaves_of(params, velocity, loss)


def jit_loop(step):
    state = State(init(), start_of_adam(init()), {"mean": np.zeros(5, np.float32)})
    for number in range(5):
        examples = dict(zip("xy", batch(number), strict=True))
        state, _ = step("a name", state, examples, key=jax.random.key(number))
    return leaves_of(state)


# --- Recordings ----------------------------------------------------------------------------------


def record(name, step, run=loop, **options):
    """Returns the final values of a recorded training."""
    given = {"arguments": ARGUMENTS, "outputs": OUTPUTS, "optimizer": SGD, "steps": [0, 2, 4]}
    if "replay" in options:
        options["replay"] = pathlib.Path(options["replay"])
    with record_jax.record(pathlib.Path(f"{name}.npz"), step, **given | options) as recorded:
        return run(recorded)


def refused(expected, step, run=loop, name="x", **options):
    """Checks that a recording ends with an error of these words."""
    try:
        record(name, step, run, **options)
    except ValueError as error:
        assert re.search(expected, str(error)), error
    else:
        raise AssertionError(f"not refused: {expected}")


def is_equal(first, second):
    return len(first) == len(second) and all(map(np.array_equal, first, second))


def is_close(first, second):
    return len(first) == len(second) and all(map(np.allclose, first, second, [1e-4] * len(first)))


def mean(*per_replica):
    return [np.mean(arrays, axis=0) for arrays in zip(*per_replica, strict=True)]
