"""Trainings with JAX, and checks of what was recorded of them."""

import collections
import itertools
import os
import pathlib
import re
import types
from functools import partial

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from lockstep import record_jax
from lockstep.recorders.jax.devices import dtype_of
from lockstep.recorders.jax.paths import weights_of
from recording import Trace

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


# --- Steps and their loops -----------------------------------------------------------------------


def shard_map_step(num_devices, noise=0.5, traces=None):
    specs = {"in_specs": (P(), P(), P("d"), P("d"), P()), "out_specs": P()}

    @partial(jax.jit, donate_argnums=(0, 1))
    @partial(jax.shard_map, mesh=mesh_of(num_devices), check_vma=False, **specs)
    def step(params, velocity, x, y, key):
        if traces is not None:
            traces.append(x.shape)
        key = record_jax.keep("random", jax.random.fold_in(key, jax.lax.axis_index("d")))
        loss, grads = jax.value_and_grad(loss_of)(params, x, y, key, noise)
        loss, grads = record_jax.keep("loss", loss), record_jax.keep("raw", grads)
        grads = record_jax.keep("sums", jax.lax.pmean(grads, "d"))
        clipped = record_jax.keep("clipped", jax.tree.map(lambda g: g.clip(-0.5, 0.5), grads))
        return *update(params, velocity, clipped), jax.lax.pmean(loss, "d")

    return step


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def jit_step(name, state, examples, *, key):
    """Trains with Adam; the state is one object, the batch a dictionary, the key a keyword."""
    params, moments, stats = state
    loss, grads = jax.value_and_grad(loss_of)(params, examples["x"], examples["y"], key, 0.5)
    params, moments = adam(params, moments, record_jax.keep("sums", grads))
    stats = {"mean": 0.9 * stats["mean"] + 0.1 * examples["x"].mean(0)}
    return State(params, moments, stats), {"loss": loss}


def leaves_of(*trees):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trees)]


def loop(step, end=6):
    """Trains for six steps, the last two with short batches; returns all arrays."""
    params, velocity = init(), zeros()
    for number in range(end):
        params, velocity, loss = step(params, velocity, *batch(number), jax.random.key(number))
    return leaves_of(params, velocity, loss)


def jit_loop(step):
    state = State(init(), start_of_adam(init()), {"mean": np.zeros(5, np.float32)})
    for number in range(5):
        examples = dict(zip("xy", batch(number), strict=True))
        state, _ = step("a name", state, examples, key=jax.random.PRNGKey(number))
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


# --- Cases ---------------------------------------------------------------------------------------


def case_shard_map():
    traces = [[], []]
    steps = [shard_map_step(2, traces=names) for names in traces]
    plain = loop(steps[0])
    # Steps that are not recorded run the same compiled function.
    assert is_equal(record("none", steps[1], steps=[100]), plain)
    assert traces[0] == traces[1] and not pathlib.Path("none.npz").exists()
    x, y = batch(0)
    lowered = steps[1].lower(init(), init(), x, y, jax.random.key(0))
    assert "callback" not in lowered.as_text()

    def noted(recorded):
        def step(*args):
            record_jax.note("ids", np.arange(len(args[2])))
            return recorded(*args)

        return loop(step)

    assert is_equal(record("two", steps[1], noted), plain)
    trace = Trace("two")
    assert [v["layout"] for v in trace.about["variables"]] == ["", "IO", "IO", "", "IO", "IO", ""]
    weights = ["a/bias", "a/kernel", "b/kernel"]
    sgd = {"learning_rate": 0.1, "momentum": 0.9, "weights": weights}
    assert trace.about["settings"][0] == [sgd]
    for position, size in ((1, 4), (2, 4), (3, 2)):  # The last batch is shorter.
        assert [a.shape for a in trace.get(position, "data", 1)] == [(size, 5), (size, 2)]
        assert is_equal(trace.get(position, "ids"), [np.arange(2 * size)])
        for kind in ("raw", "sums", "clipped", "before", "after", "random", "loss"):
            own, other = (trace.get(position, kind, replica) for replica in range(2))
            assert own and is_equal(own, other) != (kind in ("raw", "random", "loss")), kind


def case_replay():
    """The state of the other trace is loaded; permuted examples are the same ones."""
    one, two = shard_map_step(1, noise=0), shard_map_step(2, noise=0)
    given = {"run": partial(loop, end=4), "steps": [0, 2, 3]}
    record("one", one, **given)
    record("replayed", two, **given, replay="one.npz")
    record("permuted", two, **given, replay="one.npz", permute=5)
    unmatched = {"steps": [0], "replay": "one.npz", "names": {"a/kernel": "b/kernel"}}
    refused(r"no weight fits a/kernel \(5, 7\); it has a/bias \(7,\), ", two, **unmatched)
    one, replayed, permuted = map(Trace, ("one", "replayed", "permuted"))
    assert replayed.about["replayed"] == "one.npz" and permuted.about["permuted"] == 5
    moved = []
    for position, replica in itertools.product((1, 2, 3), (0, 1)):
        before = one.get(position, "before")
        assert is_equal(replayed.get(position, "before", replica), before)
        rows, others = (t.get(position, "data", replica)[0] for t in (replayed, permuted))
        moved += [not np.array_equal(rows, others)]
        assert np.array_equal(rows[rows[:, 0].argsort()], others[others[:, 0].argsort()])
        images, targets = permuted.get(position, "data", replica)
        assert np.array_equal(images[:, :2], targets)
        assert is_close(permuted.get(position, "sums"), one.get(position, "sums"))
    assert sum(moved) > 3  # A permutation of few examples may leave them where they are.


def case_jit():
    """The state is one object, the batch a dictionary, the key a keyword; a name is static."""
    places = {"params": "params", "opt_state": "moments", "state": "batch_stats"}
    options = {
        "arguments": {k: f"1/{v}" for k, v in places.items()} | {"batch": 2, "key": "key"},
        "outputs": {k: f"0/{v}" for k, v in places.items()} | {"loss": "1/loss"},
        "optimizer": {"class": "Adam", "learning_rate": lambda step: 0.01 * step},
        "steps": 3,
    }
    assert is_equal(record("one", jit_step, jit_loop, **options), jit_loop(jit_step))
    trace = Trace("one")
    slots = [(v["of"], v["slot"]) for v in trace.about["variables"] if "slot" in v]
    assert slots[:2] == [("", "count"), ("a/bias", "mu")] and slots[-1] == ("b/kernel", "nu")
    assert [s[0]["learning_rate"] for s in trace.about["settings"]] == [0.0, 0.01, 0.02]
    assert trace.get(2, "random") and [a.shape for a in trace.get(2, "data")] == [(8, 5), (8, 2)]


def case_steps_of_libraries():
    """`nnx.jit` is refused in one line; a compiled step without a tree of inputs is recorded."""

    class Step:
        def __init__(self, step):
            self.step = step

        def __call__(self, *args):
            return self.step(*args)

        def lower(self, *args):
            return types.SimpleNamespace(as_text=str, compile=object)

    step, run = shard_map_step(1), partial(loop, end=1)
    assert is_equal(record("one", Step(step), run, steps=1), run(step))
    Step.__module__ = "flax.nnx.transforms.compilation"
    refused(r"^the step of nnx\.jit changes its arguments.* and returns nnx\.state$", Step(step))


def case_weights_of_state():
    """State belongs to the weight whose path is a part of its own."""
    for weights, states, numbers, arrays in (
        ("0 1", {"mu/0": "0 mu", "mu/1": "1 mu", "nu/0": "0 nu", "nu/1": "1 nu"}, "count", ""),
        ("0 1 2", {f"{i}/{slot}": f"{i} {slot}" for i in range(3) for slot in range(2)}, "", ""),
        ("0 1", {"0": "0 ", "1": "1 "}, "", ""),
        # A list in the order of nothing that is known, and two rates beside two weights.
        ("a/b b", {}, "", "0 1"),
        ("0 1", {}, "0 1", ""),
        # A mask leaves weights out, as Optax does; a chain has other states beside.
        ("a/b b", {"1/mu/a/b": "a/b mu", "1/nu/b": "b nu"}, "1/count", ""),
        # Two models have a state each.
        ("g/w d/w", {"g/1/w": "g/w 1", "d/1/w": "d/w 1"}, "g/0 d/0", ""),
        ("", {"mu": " mu", "nu": " nu"}, "count", ""),
        # Keras has its counter and learning rate in the same list.
        ("0 1 2", {}, "0 1", "2 3 4"),
    ):
        shapes = dict.fromkeys([*states, *arrays.split()], (3,))
        shapes |= dict.fromkeys(numbers.split(), ())
        found = weights_of(dict.fromkeys(weights.split(" "), (3,)), shapes)
        expected = {path: tuple(text.split(" ")) for path, text in states.items()}
        assert found == expected, (weights, shapes, found)


def case_rounding_of_products():
    """A compiled step says to which dtype its products round, on each platform."""
    x, found = jnp.ones((2, 2)), {}
    for precision in (None, "high", "highest"):
        with jax.default_matmul_precision(precision):
            text = jax.jit(lambda x: x @ x).lower(x).as_text()
        found[precision] = [dtype_of(text, platform) for platform in ("cpu", "gpu", "tpu")]
    assert found[None] == ["", "tensorfloat32", "bfloat16"]
    assert found["high"] == ["", "tensorfloat32", ""] and found["highest"] == ["", "", ""]
    short = jax.jit(lambda x: x @ x).lower(x.astype(jnp.bfloat16)).as_text()
    assert dtype_of(short, "gpu") == "bfloat16" and not dtype_of("add f32", "gpu")


def scanned_step(order):
    """Returns a step that computes its outputs in parts of two examples, in a scan.

    Args:
        order: "rows": parts are neighbours. "columns": they are not, and the step keeps them.
            "whole": the loss of all parts is differentiated at once, and each part checkpointed.
            "once": without parts.
    """

    def loss_fn(params, x, y):
        h = record_jax.module("hidden", jnp.tanh(x @ params["a"]["kernel"] + params["a"]["bias"]))

        def layer(h, scale):
            return record_jax.module("deep", jnp.tanh(h * scale)), None

        h, _ = jax.lax.scan(layer, h, jnp.array([1.0, 1.5]))
        return ((record_jax.keep("y_pred", h @ params["b"]["kernel"]) - y) ** 2).mean()

    def of_part(params, part):
        if order == "whole":
            return jax.checkpoint(loss_fn)(params, *part)
        part = record_jax.keep("data", part) if order == "columns" else part
        return jax.value_and_grad(loss_fn)(params, *part)

    def of_parts(params, parts):
        def add(total, part):
            return jax.tree.map(jnp.add, total, of_part(params, part)), None

        start = 0.0 if order == "whole" else (0.0, jax.tree.map(jnp.zeros_like, params))
        return jax.tree.map(lambda a: a / len(parts[0]), jax.lax.scan(add, start, parts)[0])

    def device_step(params, velocity, x, y):
        parts = [a.reshape(-1, 2, a.shape[-1]) for a in (x, y)]
        if order == "columns":
            parts = [a.reshape(2, -1, a.shape[-1]).swapaxes(0, 1) for a in (x, y)]
        if order == "once":
            loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        else:
            of_all = jax.value_and_grad(of_parts) if order == "whole" else of_parts
            loss, grads = of_all(params, parts)
        grads = record_jax.keep("sums", jax.lax.pmean(record_jax.keep("raw", grads), "d"))
        return *update(params, velocity, grads), jax.lax.pmean(loss, "d")

    specs = {"in_specs": (P(), P(), P("d"), P("d")), "out_specs": P()}
    step = jax.shard_map(device_step, mesh=mesh_of(1), check_vma=False, **specs)
    return jax.jit(lambda params, velocity, x, y, _: step(params, velocity, x, y))


def case_scans():
    """What is kept in each iteration of a scan is that of one call with all examples, in order."""
    given = {"arguments": WITHOUT_KEY, "steps": 1, "run": partial(loop, end=1)}
    orders = {"once": 1, "rows": 4, "columns": 4, "whole": 1}  # Times of the loss of a part.
    bits = {order: record(order, scanned_step(order), **given) for order in orders}
    assert is_equal(bits["rows"], loop(scanned_step("rows"), end=1))
    once = Trace("once")
    (x, y), (right,), (gradient,) = (once.get(1, kind) for kind in ("data", "y_pred", "y_grad"))
    modules = once.get(1, "module_out")
    assert once.about["modules"] == ["hidden", "deep[0]", "deep[1]"]
    assert is_close(modules[2:], [np.tanh(1.5 * modules[1])])
    for order, times in orders.items():
        trace = Trace(order)
        (outputs,), (own,), data = (trace.get(1, k) for k in ("y_pred", "y_grad", "data"))
        # Parts that are no neighbours are kept in their own order.
        places = [np.flatnonzero((x == row).all(1))[0] for row in data[0]]
        assert sorted(places) == [*range(8)] and (places != [*range(8)]) == (order == "columns")
        assert is_equal([y[places]], data[1:])
        assert is_close([outputs, own], [right[places], times * gradient[places]])
        assert is_close(trace.get(1, "module_out"), [out[places] for out in modules])
        assert is_close(trace.get(1, "sums"), once.get(1, "sums"))


def case_errors():
    """Recorded steps are kept, also if the training fails; wrong arguments are refused."""
    step = shard_map_step(2)

    def interrupted(recorded):
        loop(recorded, end=3)
        raise ValueError("interrupted")

    refused("^interrupted$", step, interrupted)
    assert Trace("x").about["steps"] == [0, 2]
    assert Trace("x").about["ended_with"] == "ValueError: interrupted"

    @jax.jit
    def twice(params, velocity, x, y, key):
        grads = record_jax.keep("sums", record_jax.keep("sums", params))
        return *update(params, velocity, grads), 0.0

    no_key = {"arguments": ARGUMENTS | {"key": "seed"}}
    refused("^key: no array at 'seed' among 0/a/bias, 0/a/kernel", step, **no_key)
    refused(r"^pmap: batch of shape \(8, 5\) has no axis of devices; ", step, pmap=True)
    refused("^batch is missing; add it to arguments", step, arguments={"params": 0})
    refused("^opt_state is missing; add it to arguments", step, outputs={"params": 0})
    refused(r"^keep\('sums'\): 2 calls in a step", twice)
    unknown = "^keep: unknown kind 'grads'; use one of raw, sums"
    refused(unknown, lambda *_: record_jax.keep("grads", 1))
