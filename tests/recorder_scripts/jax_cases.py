"""Trainings for `test_jax_recorder.py`, with JAX or what stands in for it.

`python jax_cases.py FOLDER` writes traces and `results.json` to FOLDER.
"""

import collections
import json
import os
import pathlib
import sys
from functools import partial

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep import record_jax

ARGUMENTS = {"params": 0, "opt_state": 1, "batch": (2, 3), "key": 4}
OUTPUTS = {"params": 0, "opt_state": 1, "loss": 2}
SGD = {"class": "SGD", "learning_rate": 0.1, "momentum": 0.9}
HAS_JAX = not jax.__version__.endswith("stand.in")
State = collections.namedtuple("State", "params moments batch_stats")


def init():
    random = np.random.default_rng(0)
    a, b = random.normal(size=(5, 7)), random.normal(size=(7, 2))
    params = {"a": {"kernel": a, "bias": np.zeros(7)}, "b": {"kernel": b}}
    return jax.tree.map(np.float32, params)


def batch(step):
    x = np.random.default_rng(step).normal(size=(8 if step < 4 else 4, 5)).astype(np.float32)
    return x, x[:, :2]


def value_and_grad(params, x, y, key, noise=0.5):
    """Returns the loss of two linear layers with noise between them, and its gradient."""
    a, b = params["a"], params["b"]["kernel"]
    scale = 1 + noise * jax.random.normal(key, (7,))
    h = (x @ a["kernel"] + a["bias"]) * scale
    wrong = h @ b - y
    sent = wrong / len(x)
    back = sent @ b.T * scale
    grads = {"a": {"kernel": x.T @ back, "bias": back.sum(0)}, "b": {"kernel": h.T @ sent}}
    return (wrong * sent).sum() / 2, grads


def update(params, velocity, grads):
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
    return jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity


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


@partial(jax.pmap, axis_name="d", donate_argnums=(0, 1))
def pmap_step(params, velocity, x, y, key):
    loss, grads = value_and_grad(params, x, y, key)
    grads = record_jax.keep("raw", grads)
    grads = record_jax.keep("sums", jax.lax.pmean(grads, "d"))
    return *update(params, velocity, grads), loss


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def jit_step(name, state, examples, *, key):
    """Trains with Adam; the state is one object, the batch a dictionary, the key a keyword."""
    params, moments, stats = state
    loss, grads = value_and_grad(params, examples["x"], examples["y"], key)
    grads = record_jax.keep("sums", grads)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments["mu"], grads)
    nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, moments["nu"], grads)
    params = jax.tree.map(lambda p, m, v: p - 0.01 * m / (v**0.5 + 1e-7), params, mu, nu)
    stats = {"mean": 0.9 * stats["mean"] + 0.1 * examples["x"].mean(0)}
    moments = {"count": moments["count"] + 1, "mu": mu, "nu": nu}
    return State(params, moments, stats), {"loss": loss}


def loop(step, stack=0, end=6):
    """Trains for six steps, the last two with short batches; returns all arrays."""
    params = init()
    velocity = jax.tree.map(np.zeros_like, params)
    if stack:
        params, velocity = jax.tree.map(lambda a: np.stack([a] * stack), (params, velocity))
    for number in range(end):
        x, y = batch(number)
        key = jax.random.key(number)
        if stack:
            x, y = (a.reshape(stack, -1, *a.shape[1:]) for a in (x, y))
            key = jax.random.split(key, stack)
        params, velocity, loss = step(params, velocity, x, y, key)
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves((params, velocity, loss))]


def jit_loop(step, sharded):
    params = init()
    zeros = jax.tree.map(np.zeros_like, params)
    moments = {"count": np.int32(0), "mu": zeros, "nu": zeros}
    state = State(params, moments, {"mean": np.zeros(5, np.float32)})
    mesh = Mesh(jax.devices(), ("d",))
    if sharded:
        state = jax.device_put(state, NamedSharding(mesh, P()))
    for number in range(5):
        examples = dict(zip("xy", batch(number), strict=True))
        if sharded:
            examples = jax.device_put(examples, NamedSharding(mesh, P("d")))
        state, _ = step("a name", state, examples, key=jax.random.key(number))
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(state)]


def record(directory, name, step, run=loop, **options):
    """Returns the final values of a recorded training, or the message of its error."""
    options = {
        "arguments": ARGUMENTS,
        "outputs": OUTPUTS,
        "optimizer": SGD,
        "steps": [0, 2, 4],
    } | options
    for key in {"replay"} & set(options):
        options[key] = directory / options[key]
    try:
        with record_jax.record(directory / name, step, **options) as recorded:
            return run(recorded)
    except ValueError as error:
        return str(error)


def case_shard_map(directory):
    traces = [[], []]
    steps = [shard_map_step(2, traces=names) for names in traces]
    plain = loop(steps[0])
    unrecorded = record(directory, "none.npz", steps[1], steps=[100])
    x, y = batch(0)
    lowered = steps[1].lower(init(), init(), x, y, jax.random.key(0))
    return {
        "plain": plain,
        "unrecorded": unrecorded,
        "retraced": HAS_JAX and traces[0] != traces[1],
        "recorded": record(directory, "two.npz", steps[1]),
        "has_callback": HAS_JAX and "callback" in lowered.as_text(),
    }


def write_torch_trace(directory):
    """Writes a recording of the same weights in PyTorch's form: transposed, with other names."""
    with np.load(directory / "one.npz") as one:
        about = json.loads(str(one["about"]))
        about |= {"framework": "torch", "variables": []}
        arrays = {}
        weights = [("a.bias", "", 0), ("a.weight", "OI", 1), ("b.weight", "OI", 2)]
        for index, (name, layout, source) in enumerate(reversed(weights)):
            about["variables"].append({"name": name, "kind": "weight", "layout": layout})
            for position in (1, 2, 3):
                arrays[f"{position}/before/0/{index}"] = one[f"{position}/before/0/{source}"].T
        np.savez(directory / "torch.npz", about=np.array(json.dumps(about)), **arrays)


def case_replay(directory):
    one, two = shard_map_step(1, noise=0), shard_map_step(2, noise=0)
    results = {"one": record(directory, "one.npz", one), "two": record(directory, "two.npz", two)}
    record(directory, "replayed.npz", two, replay="one.npz")
    record(directory, "permuted.npz", two, replay="one.npz", permute=5)
    results["missing_step"] = record(directory, "x.npz", two, replay="one.npz", steps=[0, 1])
    results["missing_file"] = record(directory, "x.npz", two, replay="none.npz")
    write_torch_trace(directory)
    record(directory, "of_torch.npz", two, replay="torch.npz", names={"a/bias": "a.bias"})
    wrong = {"names": {"a/kernel": "b.weight"}, "replay": "torch.npz"}
    results["wrong_name"] = record(directory, "x.npz", two, **wrong)
    return results


def case_pmap(directory):
    two = partial(loop, stack=2)
    results = {"recorded": record(directory, "two.npz", pmap_step, two, pmap=True)}
    results |= {"plain": two(pmap_step)}
    one = partial(loop, stack=1)
    record(directory, "one.npz", pmap_step, one, pmap=True, replay="two.npz")
    record(directory, "permuted.npz", pmap_step, two, pmap=True, replay="two.npz", permute=5)
    results["no_axis"] = record(directory, "x.npz", shard_map_step(2), loop, pmap=True)
    return results


def case_jit(directory):
    results = {}
    for name, sharded in (("one", False), ("two", True)):
        run = partial(jit_loop, sharded=sharded)
        results[name] = run(jit_step)
        results[f"recorded_{name}"] = record(
            directory,
            f"{name}.npz",
            jit_step,
            run,
            arguments={
                "params": "1/params",
                "opt_state": "1/moments",
                "state": "1/batch_stats",
                "batch": 2,
                "key": "key",
            },
            outputs={
                "params": "0/params",
                "opt_state": "0/moments",
                "state": "0/batch_stats",
                "loss": "1/loss",
            },
            optimizer={"class": "Adam", "learning_rate": lambda step: 0.01 * step},
            steps=3,
            **({"replay": "one.npz"} if sharded else {}),
        )
    return results


def case_errors(directory):
    step, results = shard_map_step(2), {}

    def interrupted(recorded):
        loop(recorded, end=3)
        raise ValueError("interrupted")

    results["interrupted"] = record(directory, "interrupted.npz", step, interrupted)
    before = (directory / "interrupted.npz").read_bytes()
    savez, np.savez = np.savez, lambda file, **_: file.write(b"half") and 1 / 0
    try:
        record(directory, "interrupted.npz", step)
    except ZeroDivisionError:
        results["kept"] = (directory / "interrupted.npz").read_bytes() == before
    np.savez = savez
    places = {"arguments": ARGUMENTS | {"key": "seed"}}
    results["no_key"] = record(directory, "x.npz", step, **places)
    results["no_batch"] = record(directory, "x.npz", step, arguments={"params": 0})
    results["no_output"] = record(directory, "x.npz", step, outputs={"params": 0})

    @jax.jit
    def twice(params, velocity, x, y, key):
        grads = record_jax.keep("sums", record_jax.keep("sums", params))
        return *update(params, velocity, grads), 0.0

    results["twice"] = record(directory, "x.npz", twice)
    results["kind"] = record(directory, "x.npz", lambda *_: record_jax.keep("grads", 1))
    return results


CASES = (case_shard_map, case_replay, case_pmap, case_jit, case_errors)

if __name__ == "__main__":
    results = {}
    for case in CASES:
        name = case.__name__.removeprefix("case_")
        folder = pathlib.Path(sys.argv[1], name)
        folder.mkdir()
        results[name] = case(folder)
    pathlib.Path(sys.argv[1], "results.json").write_text(json.dumps(results))
