"""Steps of JAX and their loops, which the cases of `jax_cases.py` record."""

import collections
import os
import pathlib
import re
from functools import partial

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep import record_jax

ARGUMENTS = {"params": 0, "opt_state": 1, "batch": (2, 3), "key": 4}
WITHOUT_KEY = {"params": 0, "opt_state": 1, "batch": (2, 3)}
OUTPUTS = {"params": 0, "opt_state": 1, "loss": 2}
SGD = {"class": "SGD", "learning_rate": 0.1, "momentum": 0.9}
State = collections.namedtuple("State", "params moments batch_stats")


def init():
    random = np.random.default_rng(0)
    a, b = random.normal(size=(5, 7)), random.normal(size=(7, 2))
    params = {"a": {"kernel": a, "bias": np.zeros(7)}, "b": {"kernel": b}}
    return jax.tree.map(np.float32, params)


def zeros():
    return jax.tree.map(np.zeros_like, init())


def batch(step):
    x = np.random.default_rng(step).normal(size=(8 if step < 4 else 4, 5)).astype(np.float32)
    return x, x[:, :2]


def value_and_grad(params, x, y, key, noise=0.5, whole=lambda outputs: outputs):
    """Returns the loss of two linear layers with noise between them, and its gradient."""
    a, b = params["a"], params["b"]["kernel"]
    scale = 1 + noise * jax.random.normal(key, a["bias"].shape)
    h = (x @ a["kernel"] + a["bias"]) * scale
    wrong = whole(h @ b) - y
    sent = wrong / len(x)
    back = sent @ b.T * scale
    grads = {"a": {"kernel": x.T @ back, "bias": back.sum(0)}, "b": {"kernel": h.T @ sent}}
    return (wrong * sent).sum() / 2, grads


def update(params, velocity, grads, kept=0.9):
    velocity = jax.tree.map(lambda v, g: kept * v + g, velocity, grads)
    return jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity


def moments_of(state, grads):
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
    nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["nu"], grads)
    return {"count": state["count"] + 1, "mu": mu, "nu": nu}


def adam(params, state, grads):
    state = moments_of(state, grads)
    first, second = 1 - 0.9 ** state["count"], 1 - 0.999 ** state["count"]

    def applied(p, m, v):
        return p - 0.01 * ((m / first) / ((v / second) ** 0.5 + 1e-8)).astype(np.float32)

    return jax.tree.map(applied, params, state["mu"], state["nu"]), state


def start_of_adam():
    return {"count": np.int32(0), "mu": zeros(), "nu": zeros()}


# --- Steps -------------------------------------------------------------------------------------


def shard_map_step(num_devices, noise=0.5, traces=None):
    mesh = Mesh(jax.devices()[:num_devices], ("d",))

    @partial(jax.jit, donate_argnums=(0, 1))
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P("d"), P("d"), P()),
        out_specs=(P(), P(), P()),
    )
    def step(params, velocity, x, y, key):
        if traces is not None:
            traces.append(x.shape)
        key = record_jax.keep("random", jax.random.fold_in(key, jax.lax.axis_index("d")))
        loss, grads = value_and_grad(params, x, y, key, noise)
        loss, grads = record_jax.keep("loss", loss), record_jax.keep("raw", grads)
        grads = record_jax.keep("sums", jax.lax.pmean(grads, "d"))
        clipped = record_jax.keep("clipped", jax.tree.map(lambda g: g.clip(-0.5, 0.5), grads))
        return *update(params, velocity, clipped), jax.lax.pmean(loss, "d")

    return step


def step_of_device(params, velocity, x, y, key):
    loss, grads = value_and_grad(params, x, y, key)
    grads = record_jax.keep("raw", grads)
    grads = record_jax.keep("sums", jax.lax.pmean(grads, "d"))
    return *update(params, velocity, grads), loss


pmap_step = jax.pmap(step_of_device, axis_name="d", donate_argnums=(0, 1))
pmap_step_of_one_copy = jax.pmap(step_of_device, axis_name="d", in_axes=(None, None, 0, 0, 0))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def jit_step(name, state, examples, *, key):
    """Trains with Adam; the state is one object, the batch a dictionary, the key a keyword."""
    params, moments, stats = state
    loss, grads = value_and_grad(params, examples["x"], examples["y"], key)
    params, moments = adam(params, moments, record_jax.keep("sums", grads))
    stats = {"mean": 0.9 * stats["mean"] + 0.1 * examples["x"].mean(0)}
    return State(params, moments, stats), {"loss": loss}


SPECS = {"a": {"kernel": P(None, "model"), "bias": P("model")}, "b": {"kernel": P("model")}}


def mesh_step(mesh):
    """Returns a step whose hidden features are split over "model", and examples over "data"."""

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(SPECS, SPECS, P("data"), P("data")),
        out_specs=(SPECS, SPECS, P()), check_vma=False,
    )  # fmt: skip
    def step(params, velocity, x, y):
        whole, key = partial(jax.lax.psum, axis_name="model"), jax.random.key(0)
        loss, grads = value_and_grad(params, x, y, key, 0, whole)
        grads = record_jax.keep("raw", grads)
        grads = record_jax.keep("sums", jax.lax.pmean(grads, "data"), SPECS)
        loss = record_jax.keep("loss", loss)
        return *update(params, velocity, grads), jax.lax.pmean(loss, "data")

    return step


def averaged_step(bug=""):
    """Returns a step that also returns averages of weights and a counter."""

    @jax.jit
    def step(params, velocity, x, y, averages, count):
        loss, grads = value_and_grad(params, x, y, jax.random.key(0))
        grads = record_jax.keep("unclipped", record_jax.keep("sums", grads))
        grads = record_jax.keep("clipped", jax.tree.map(lambda g: g.clip(-0.5, 0.5), grads))
        params, velocity = update(params, velocity, grads)
        for _ in range(2 if bug == "averages" else 1):
            averages = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, averages, params)
        return params, velocity, averages, count + (2 if bug == "count" else 1), loss

    return step


def two_model_step(bug=""):
    """Returns a step with an update of each of two models, which two compiled functions make."""

    def trained(state, loss_fn, factor=1.0):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        grads = jax.tree.map(lambda g: factor * g, grads)
        params, moments = adam(state["params"], state["moments"], grads)
        return {"params": params, "moments": moments}, grads, loss

    def generated(params, x):
        return jnp.tanh(x @ params["w"] + params["b"])

    @jax.jit
    def train_d(d, g, x, y):
        fake = generated(g["params"], x)

        def loss_fn(params):
            return jnp.mean((1 - y @ params["w"]) ** 2) + jnp.mean((fake @ params["w"]) ** 2)

        return trained(d, loss_fn, 2.0 if bug else 1.0)

    @jax.jit
    def train_g(g, d, x):
        def loss_fn(params):
            return jnp.mean((1 - generated(params, x) @ d["params"]["w"]) ** 2)

        return trained(g, loss_fn)

    def step(states, x, y):
        d, grads_d, _ = train_d(states["d"], states["g"], x, y)
        g, grads_g, loss = train_g(states["g"], d, x)
        record_jax.keep("sums", (grads_g, grads_d))
        return {"g": g, "d": d}, loss

    return step


def two_model_loop(step, num_devices):
    shapes = {"g": {"w": (5, 2), "b": (2,)}, "d": {"w": (2, 3)}}
    random, states = np.random.default_rng(0), {}
    for name, own in shapes.items():
        params = {key: np.float32(random.normal(size=shape)) for key, shape in own.items()}
        zeros = jax.tree.map(np.zeros_like, params)
        states[name] = {"params": params, "moments": start_of_adam() | {"mu": zeros, "nu": zeros}}
    mesh = Mesh(jax.devices()[:num_devices], ("d",))
    states = jax.device_put(states, NamedSharding(mesh, P()))
    for number in range(3):
        states, _ = step(states, *jax.device_put(batch(number), NamedSharding(mesh, P("d"))))
    return leaves_of(states)


def clipping_step(num_devices, kind, bug=""):
    """Returns a step that clips within its update, as a chain of Optax, and does not keep it."""
    mesh = Mesh(jax.devices()[:num_devices], ("d",))
    updated = adam if kind == "Adam" else partial(update, kept=0.9 if kind == "SGD" else 0.0)

    def clipped(grads, limit):
        if kind == "Adam":
            return jax.tree.map(lambda g: g.clip(-limit, limit), grads)
        norm = sum((g * g).sum() for g in jax.tree.leaves(grads)) ** 0.5
        return jax.tree.map(lambda g: g * (limit / norm), grads)

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("d"), P("d")), out_specs=(P(), P(), P())
    )
    def step(params, state, x, y):
        loss, grads = value_and_grad(params, x, y, jax.random.key(0), 0)
        if bug == "before the sum":
            grads = clipped(grads, 2.5)
        mean = jax.lax.pmean(record_jax.keep("raw", grads), "d")
        mean = jax.tree.map(lambda g: 2 * g, mean) if bug == "doubled" else mean
        grads = record_jax.keep("sums", mean)
        if bug in ("", "limit", "doubled"):
            grads = clipped(grads, 2.0 if bug == "limit" else 2.5)
        return *updated(params, state, grads), jax.lax.pmean(loss, "d")

    return step


# --- Loops -------------------------------------------------------------------------------------


ROWS = {"a": P("data"), "b": P("data")}


def scattering_step(num_devices, specs, bug=""):
    """Returns a step that scatters gradients, keeps the rows of a device, and gathers them."""

    def step(params, x, y):
        def loss_fn(params):
            return jnp.mean((jnp.tanh(x[:, :4] + params["a"]) @ params["b"] - y[:, :1]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        rows = jax.tree.map(lambda g: jax.lax.psum_scatter(g, "data", tiled=True), grads)
        rows = rows if bug else jax.tree.map(lambda g: g / num_devices, rows)
        rows = record_jax.keep("sums", rows, specs)
        grads = jax.tree.map(lambda g: jax.lax.all_gather(g, "data", tiled=True), rows)
        record_jax.keep("clipped", ravel_pytree(grads)[0])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, jax.lax.pmean(loss, "data")

    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    in_specs, out_specs = (P(), P("data"), P("data")), (P(), P())
    mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped)


def scattering_loop(step, num_devices=0):
    """Trains for three steps; with a number of devices, they have the rows of the weights."""
    params = {"a": jnp.arange(4.0) / 4, "b": jnp.ones((4, 6)) / jnp.arange(1.0, 7)}
    rows = NamedSharding(Mesh(jax.devices()[: num_devices or 1], ("data",)), P("data"))
    params = jax.device_put(params, rows) if num_devices else params
    for number in range(3):
        x, y = jax.device_put(batch(number), rows) if num_devices else batch(number)
        params, _ = step(params, x, y)
    return leaves_of(params)


def gathering_step(num_devices, bug=""):
    """Returns a step that gathers weights, whose gradients JAX sums and scatters."""

    def step(params, x, y):
        def loss_fn(params):
            whole = jax.tree.map(lambda p: jax.lax.all_gather(p, "data", tiled=True), params)
            return jnp.mean((jnp.tanh(x[:, :4] + whole["a"]) @ whole["b"] - y[:, :1]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        grads = record_jax.keep("raw", grads)
        grads = jax.tree.map(lambda g: g / (1 if bug else num_devices), grads)
        grads = record_jax.keep("sums", grads)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), jax.lax.pmean(loss, "data")

    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    specs = {"in_specs": (P("data"), P("data"), P("data")), "out_specs": (P("data"), P())}
    return jax.jit(jax.shard_map(step, mesh=mesh, **specs, check_vma=False))


def leaves_of(*trees):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trees)]


def loop(step, stack=0, end=6, one_copy=False):
    """Trains for six steps, the last two with short batches; returns all arrays."""
    params, velocity = init(), zeros()
    if stack and not one_copy:
        params, velocity = jax.tree.map(lambda a: np.stack([a] * stack), (params, velocity))
    for number in range(end):
        x, y = batch(number)
        key = jax.random.key(number)
        if stack:
            x, y = (a.reshape(stack, -1, *a.shape[1:]) for a in (x, y))
            key = jax.random.split(key, stack)
        params, velocity, loss = step(params, velocity, x, y, key)
        if one_copy:
            params, velocity = jax.tree.map(lambda a: np.asarray(a[0]), (params, velocity))
    return leaves_of(params, velocity, loss)


def jit_loop(step, sharded):
    state = State(init(), start_of_adam(), {"mean": np.zeros(5, np.float32)})
    mesh = Mesh(jax.devices()[:2], ("d",))
    if sharded:
        state = jax.device_put(state, NamedSharding(mesh, P()))
    for number in range(5):
        examples = dict(zip("xy", batch(number), strict=True))
        if sharded:
            examples = jax.device_put(examples, NamedSharding(mesh, P("d")))
        state, _ = step("a name", state, examples, key=jax.random.key(number))
    return leaves_of(state)


def mesh_loop(step, mesh):
    params = init()
    params["a"] = {"kernel": params["a"]["kernel"][:, :6], "bias": params["a"]["bias"][:6]}
    params["b"] = {"kernel": params["b"]["kernel"][:6]}
    sharding = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    velocity = jax.tree.map(np.zeros_like, params)
    params, velocity = (jax.tree.map(jax.device_put, tree, sharding) for tree in (params, velocity))
    for number in range(4):
        examples = [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in batch(number)]
        params, velocity, loss = step(params, velocity, *examples)
    return leaves_of(params, velocity, loss)


def averaged_loop(step):
    params, count, velocity, averages = init(), np.int32(0), zeros(), zeros()
    for number in range(3):
        x, y = batch(number)
        params, velocity, averages, count, loss = step(params, velocity, x, y, averages, count)
    return leaves_of(params, averages, loss)


def clipping_loop(step, kind):
    params, state = init(), start_of_adam() if kind == "Adam" else zeros()
    for number in range(3):
        params, state, loss = step(params, state, *batch(number))
    return leaves_of(params, loss)


# --- Recordings --------------------------------------------------------------------------------


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
