"""Cases of JAX: trainings, and checks of what was recorded of them."""
# ruff: noqa: F403, F405 (the names of `jax_steps`)

import itertools
import json
import pathlib
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_steps import *
from lockstep import compare, record_jax
from lockstep.recorders.jax.devices import dtype_of
from lockstep.recorders.jax.paths import flatten, weights_of
from recording import Trace


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
    check_about(trace.about)
    for position, size in ((1, 4), (2, 4), (3, 2)):  # The last batch is shorter.
        assert [a.shape for a in trace.get(position, "data", 1)] == [(size, 5), (size, 2)]
        assert is_equal(trace.get(position, "ids"), [np.arange(2 * size)])
        raw = [trace.get(position, "raw", replica) for replica in range(2)]
        assert not is_equal(*raw)
        for replica in range(2):
            kinds = ("sums", "clipped", "before", "after")
            sums, clipped, before, after = (trace.get(position, k, replica) for k in kinds)
            assert is_close(sums, mean(*raw))
            assert is_equal(clipped, [a.clip(-0.5, 0.5) for a in sums])
            velocity = [0.9 * v + g for v, g in zip(before[3:6], clipped, strict=True)]
            weights = [p - 0.1 * v for p, v in zip(before[:3], velocity, strict=True)]
            assert is_close(after[:6], weights + velocity)
        keys = [trace.get(position, "random", replica)[0] for replica in range(2)]
        assert keys[0].dtype == np.uint8 and not np.array_equal(*keys)
        losses = [trace.get(position, "loss", replica)[0] for replica in range(2)]
        assert losses[0].shape == () and losses[0] != losses[1]


def check_about(about):
    weights, sgd = ["a/bias", "a/kernel", "b/kernel"], {"learning_rate": 0.1, "momentum": 0.9}
    expected = {
        **{"format": "lockstep trace", "version": 2, "framework": "jax", "order": "reduce, clip"},
        **{"num_replicas": 2, "replicas": [0, 1], "steps": [0, 2, 4], "reduction": "mean"},
        **{"gradients": weights, "permuted": None, "replayed": None},
        "optimizer": {"class": "SGD", "framework": "jax", **sgd},
    }
    assert about.items() >= expected.items()
    assert about["settings"][0] == [{**sgd, "weights": weights}]
    assert [v["layout"] for v in about["variables"]] == ["", "IO", "IO", "", "IO", "IO", ""]
    kinds = ["weight"] * 3 + ["optimizer state"] * 3 + ["seed"]
    assert [v["kind"] for v in about["variables"]] == kinds
    assert about["variables"][4] == {
        **{"name": "opt_state/a/kernel", "kind": "optimizer state", "layout": "IO"},
        **{"of": "a/kernel", "slot": "momentum"},
    }


def write_torch_trace():
    """Writes a recording of the same weights in PyTorch's form: transposed, with other names."""
    one, arrays = Trace("one"), {}
    about = one.about | {"framework": "torch", "variables": [], "gradients": []}
    about |= {"settings": [], "aliases": {}}
    weights = [("a.bias", "", 0), ("a.weight", "OI", 1), ("b.weight", "OI", 2)]
    for index, (name, layout, source) in enumerate(reversed(weights)):
        about["variables"].append({"name": name, "kind": "weight", "layout": layout})
        for position in (1, 2, 3):
            arrays[f"{position}/before/0/{index}"] = one.get(position, "before")[source].T
    np.savez("torch.npz", about=np.array(json.dumps(about)), **arrays)


def case_replay():
    """The state of the other trace is loaded; permuted examples are the same ones."""
    one, two = shard_map_step(1, noise=0), shard_map_step(2, noise=0)
    given = {"run": partial(loop, end=4), "steps": [0, 2, 3]}
    record("one", one, **given)
    write_torch_trace()
    record("two", two, **given)
    record("replayed", two, **given, replay="one.npz")
    record("permuted", two, **given, replay="one.npz", permute=5)
    record("of_torch", two, **given, replay="torch.npz", names={"a/bias": "a.bias"})
    refused(r"one.npz: lacks steps \[1\]; it has \[0, 2, 3\]$", two, replay="one.npz", steps=[0, 1])
    refused("replay=none.npz: does not exist", two, replay="none.npz")
    unmatched = {"steps": 1, "replay": "torch.npz", "names": {"a/kernel": "b.weight"}}
    refused(r"no weight fits a/kernel \(5, 7\); it has b.weight \(2, 7\)", two, **unmatched)
    names = ("one", "two", "replayed", "permuted", "of_torch")
    one, two, replayed, permuted, of_torch = map(Trace, names)
    assert replayed.about["replayed"] == "one.npz" and permuted.about["permuted"] == 5
    assert not is_equal(two.get(3, "before"), one.get(3, "before"))  # Other rounding.
    moved = []
    for position in (1, 2, 3):
        before = one.get(position, "before")
        for replica in range(2):
            assert is_equal(replayed.get(position, "before", replica), before)
            assert is_equal(of_torch.get(position, "before", replica)[:3], before[:3])
            rows, others = (t.get(position, "data", replica)[0] for t in (replayed, permuted))
            moved += [not np.array_equal(rows, others)]
            assert np.array_equal(rows[rows[:, 0].argsort()], others[others[:, 0].argsort()])
            images, targets = permuted.get(position, "data", replica)
            assert np.array_equal(images[:, :2], targets)
        for trace in (replayed, permuted):
            assert is_close(trace.get(position, "sums"), one.get(position, "sums"))
    verdict = compare("one.npz", "replayed.npz")
    assert verdict.ok and {"sum", "update"} <= {each.node for each in verdict.measured}
    assert sum(moved) > 3  # A permutation of few examples may leave them where they are.


def case_pmap():
    """A step is recorded without its axis of devices."""
    run, given = partial(loop, stack=2, end=4), {"pmap": True, "steps": [0, 2, 3]}
    assert is_equal(record("two", pmap_step, run, **given), run(pmap_step))
    record("one", pmap_step, partial(run, stack=1), **given, replay="two.npz")
    record("permuted", pmap_step, run, **given, replay="two.npz", permute=5)
    no_axis = r"^pmap: batch of shape \(8, 5\) has no axis of devices; "
    refused(no_axis, shard_map_step(2), pmap=True)
    given["pmap"] = "batch", "key"
    record("none", pmap_step_of_one_copy, partial(run, one_copy=True), **given)
    two, one, permuted, none = map(Trace, ("two", "one", "permuted", "none"))
    for position, kind in itertools.product((1, 2, 3), ("before", "raw", "after", "data")):
        assert is_close(none.get(position, kind, 1)[:6], two.get(position, kind, 1)[:6])
    assert two.about["num_replicas"] == 2 and one.about["num_replicas"] == 1
    moved = []
    for position in (1, 2, 3):
        shapes = [a.shape for a in two.get(position, "before", 1)]
        assert shapes == [(7,), (5, 7), (7, 2)] * 2 + [(2,)]
        raw = [two.get(position, "raw", replica) for replica in range(2)]
        sums = two.get(position, "sums")
        assert not is_equal(*raw) and is_close(sums, mean(*raw))
        keys = [two.get(position, "random", replica)[0] for replica in range(2)]
        assert not np.array_equal(*keys)
        assert is_equal(one.get(position, "before")[:6], two.get(position, "before")[:6])
        x, permuted_x = (t.get(position, "data", 1)[0] for t in (two, permuted))
        moved += [not np.array_equal(x, permuted_x)]
        assert np.array_equal(np.sort(x, axis=0), np.sort(permuted_x, axis=0))
    assert any(moved)


def case_jit():
    """A step with shardings has no gradient of one device."""
    places = {"params": "params", "opt_state": "moments", "state": "batch_stats"}
    options = {
        "arguments": {k: f"1/{v}" for k, v in places.items()} | {"batch": 2, "key": "key"},
        "outputs": {k: f"0/{v}" for k, v in places.items()} | {"loss": "1/loss"},
        "optimizer": {"class": "Adam", "learning_rate": lambda step: 0.01 * step},
        "steps": 3,
    }
    run = partial(jit_loop, sharded=False)
    assert is_equal(record("one", jit_step, run, **options), run(jit_step))
    record("two", jit_step, partial(jit_loop, sharded=True), replay="one.npz", **options)
    two, one = Trace("two"), Trace("one")
    assert (one.about["num_replicas"], two.about["num_replicas"]) == (1, 2)
    slots = [(v["of"], v["slot"]) for v in two.about["variables"] if "slot" in v]
    assert slots[:2] == [("", "count"), ("a/bias", "mu")] and slots[-1] == ("b/kernel", "nu")
    kinds = {v["name"]: v["kind"] for v in two.about["variables"]}
    count = two.get(1, "before")[list(kinds).index("opt_state/count")]
    assert count.dtype == np.int32 and count == 0
    assert kinds["state/mean"] == "statistic" and kinds["key"] == "seed"
    assert [s[0]["learning_rate"] for s in two.about["settings"]] == [0.0, 0.01, 0.02]
    assert two.about["reduction"] == "" and not two.get(1, "raw")
    for position in (1, 2, 3):
        assert is_equal(two.get(position, "before", 1), one.get(position, "before"))
        assert is_close(two.get(position, "sums", 1), one.get(position, "sums"))
        assert is_close(two.get(position, "after", 1), one.get(position, "after"))
        assert two.get(position, "random", 0) and not two.get(position, "random", 1)
        assert two.get(position, "data", 1)[0].shape == (4, 5)


def case_steps_of_libraries():
    """`nnx.jit` is refused in one line; a compiled step without a tree of inputs is recorded."""

    class Step:
        def __init__(self, step):
            self.step = step

        def __call__(self, *args):
            return self.step(*args)

        def lower(self, *args):
            return self

        def as_text(self):
            return ""

        def compile(self):
            return self

    step = shard_map_step(1)
    assert is_equal(record("one", Step(step)), loop(step))
    Step.__module__ = "flax.nnx.transforms.compilation"
    refused(r"^the step of nnx\.jit changes its arguments.* and returns nnx\.state$", Step(step))


def case_weights_of_state():
    """State belongs to the weight whose path is a part of its own."""

    class Moments(NamedTuple):
        count: str
        mu: Any
        nu: Any

    listed, named = ["0", "1", "2"], {"a": {"b": "a/b"}, "b": "b"}
    shape = (3,)
    for weights, state, expected in (
        (listed, Moments("c", ["m0", "m1", "m2"], ["n0", "n1", "n2"]),
            {f"{slot[0]}{i}": (str(i), slot) for i in range(3) for slot in ("mu", "nu")}),
        (listed, [("m0", "v0"), ("m1", "v1"), ("m2", "v2")],
            {f"{s}{i}": (str(i), str("mv".find(s))) for i in range(3) for s in "mv"}),
        (listed, ["m0", "m1", "m2"], {f"m{i}": (str(i), "") for i in range(3)}),
        # A list in the order of nothing that is known, and two rates beside two weights.
        (named, ["m0", "m1"], {}),
        (("0", "1"), ("c", "c2"), {}),
        # A mask leaves weights out, as Optax does; a chain has other states beside.
        (named, ((), Moments("c", {"a": {"b": "m0"}, "b": ()}, {"a": {"b": ()}, "b": "v1"})),
            {"m0": ("a/b", "mu"), "v1": ("b", "nu")}),
        # Two models have a state each.
        ({"g": {"w": "g/w"}, "d": {"w": "d/w", "b": "d/b"}},
            {"g": ("c", {"w": "m0"}), "d": ("c2", {"w": "m1", "b": "m2"})},
            {"m0": ("g/w", "1"), "m1": ("d/w", "1"), "m2": ("d/b", "1")}),
        ("0", Moments("c", "m0", "v0"), {"m0": ("0", "mu"), "v0": ("0", "nu")}),
        ({}, Moments("c", {}, {}), {}),
        # Keras has its counter and learning rate in the same list.
        (listed, ["c", "c2", "m0", "m1", "m2"], {}),
    ):  # fmt: skip
        by_path = [dict(zip(*flatten(tree)[:2], strict=True)) for tree in (weights, state)]
        known, own = by_path
        shapes = [
            {path: () if name.startswith("c") else shape for path, name in names.items()}
            for names in by_path
        ]
        found = {own[p]: (known[w], slot) for p, (w, slot) in weights_of(*shapes).items()}
        assert found == expected, (weights, state, found)


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


def scanned_step(order, devices=1):
    """Returns a step that computes its outputs in parts of two examples, in a scan.

    Args:
        order: "rows": parts are neighbours. "columns": they are not, and the step keeps them.
            "whole": the loss of all parts is differentiated at once, and each part checkpointed.
            "once": without parts.
        devices: their number.
    """

    def loss_fn(params, x, y):
        h = record_jax.module("hidden", jnp.tanh(x @ params["a"]["kernel"] + params["a"]["bias"]))

        def layer(h, scale):
            return record_jax.module("deep", jnp.tanh(h * scale)), None

        h, _ = jax.lax.scan(layer, h, jnp.array([1.0, 1.5]))
        return ((record_jax.keep("y_pred", h @ params["b"]["kernel"]) - y) ** 2).mean()

    def whole(params, parts):
        def add_loss(total, part):
            return total + jax.checkpoint(loss_fn)(params, *part), None

        return jax.lax.scan(add_loss, 0.0, parts)[0] / len(parts[0])

    def of_parts(params, x, y):
        if order == "once":
            return jax.value_and_grad(loss_fn)(params, x, y)
        parts = [a.reshape(-1, 2, a.shape[-1]) for a in (x, y)]
        if order == "columns":
            parts = [a.reshape(2, -1, a.shape[-1]).swapaxes(0, 1) for a in (x, y)]
        if order == "whole":
            return jax.value_and_grad(whole)(params, parts)

        def add(total, part):
            part = record_jax.keep("data", part) if order == "columns" else part
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, *part)), None

        sums, _ = jax.lax.scan(add, (0.0, jax.tree.map(jnp.zeros_like, params)), parts)
        return jax.tree.map(lambda a: a / len(parts[0]), sums)

    def device_step(params, velocity, x, y):
        loss, grads = of_parts(params, x, y)
        grads = record_jax.keep("sums", jax.lax.pmean(record_jax.keep("raw", grads), "d"))
        return *update(params, velocity, grads), jax.lax.pmean(loss, "d")

    mesh = Mesh(jax.devices()[:devices], ("d",))
    specs = {"in_specs": (P(), P(), P("d"), P("d")), "out_specs": P()}
    step = jax.shard_map(device_step, mesh=mesh, check_vma=False, **specs)
    return jax.jit(lambda params, velocity, x, y, _: step(params, velocity, x, y))


def case_scans():
    """What is kept in each iteration of a scan is that of one call with all examples, in order."""
    given = {"arguments": WITHOUT_KEY, "steps": 1, "run": partial(loop, end=1)}
    plain = loop(scanned_step("rows"), end=1)
    orders = {"once": 1, "rows": 4, "columns": 4, "whole": 1}  # Times of the loss of a part.
    bits = {order: record(order, scanned_step(order), **given) for order in orders}
    assert is_equal(bits["rows"], plain)
    once = Trace("once")
    (x, y), (right,), (gradient,) = (once.get(1, kind) for kind in ("data", "y_pred", "y_grad"))
    hidden, first, second = once.get(1, "module_out")
    assert once.about["modules"] == ["hidden", "deep[0]", "deep[1]"]
    assert is_close([second], [np.tanh(1.5 * first)])
    for order, times in orders.items():
        trace = Trace(order)
        (outputs,), (own,), data = (trace.get(1, k) for k in ("y_pred", "y_grad", "data"))
        # Parts that are no neighbours are kept in their own order.
        places = [np.flatnonzero((x == row).all(1))[0] for row in data[0]]
        assert sorted(places) == [*range(8)] and (places != [*range(8)]) == (order == "columns")
        assert is_equal([y[places]], data[1:])
        assert is_close([outputs, own], [right[places], times * gradient[places]])
        expected = [out[places] for out in (hidden, first, second)]
        assert is_close(trace.get(1, "module_out"), expected)
        assert is_close(trace.get(1, "sums"), once.get(1, "sums"))
    two = scanned_step("rows", devices=2)
    record("two", two, **given, replay="once.npz")
    assert [a.shape for a in Trace("two").get(1, "y_pred", 1)] == [(4, 2)]
    verdict = compare("once.npz", "two.npz")
    assert verdict.status == "clean", str(verdict)


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
    refused("^step: must be a function, as from jax.jit, and is None$", None)
    refused("^arguments: must be the places of arrays by their names, ", step, arguments=None)
    refused("^optimizer: must be settings by their names, and is an obj", step, optimizer="sgd")
    refused("^pmap: must be True, or names of arguments, and is an obj", step, pmap=5)
    refused("^batch is missing; add it to arguments", step, arguments={"params": 0})
    refused("^opt_state is missing; add it to arguments", step, outputs={"params": 0})
    refused(r"^keep\('sums'\): 2 calls in a step", twice)
    refused("^nowhere/x.npz: must be an .npz file in a folder that exists$", step, name="nowhere/x")
    unknown = "^keep: unknown kind 'grads'; use one of raw, sums"
    refused(unknown, lambda *_: record_jax.keep("grads", 1))
