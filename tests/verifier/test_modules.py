"""Modules: the first wrong one is said, also of parts on ranks, and of networks of PyTorch."""

import numpy as np
import pytest

from lockstep.data.trace import OF_MODULES, About, Trace, Variable
from lockstep.engine import verify
from lockstep.engine.verdict import FAULT

from .changes import on_two_ranks

NUM, WIDTH, CLASSES = 12, 6, 4
MODULES = ("layers.0", "layers.0.linear", "layers.0.act", "head")
WEIGHTS = ("layers.0.linear.weight", "layers.0.linear.bias", "head.weight", "head.bias")


def trained(*, replicas=1, parts=1, modules=MODULES, wrong=None, **about):
    """Returns a recording of a step of `head(x + act(linear(x)))` on examples in its own order.

    Args:
        parts: number of micro-batches.
        modules: the recorded ones.
        wrong: array in the recording, such as "layers.0.act" or "head gradient" → function that
            changes it on replica 1; "x" and "x gradient" are those between the modules.
    """
    generator = np.random.default_rng(0)
    x_all, y_all = (generator.normal(size=(NUM, n)).astype(np.float32) for n in (WIDTH, CLASSES))
    shapes = (WIDTH, WIDTH), (WIDTH,), (CLASSES, WIDTH), (CLASSES,)
    w1, b1, w2, b2 = weights = [generator.normal(size=s).astype(np.float32) for s in shapes]
    order = np.random.default_rng(replicas).permutation(NUM)
    trace = Trace(
        About(
            "torch", replicas, steps=(0,), modules=tuple(modules), gradients=WEIGHTS,
            variables=tuple(Variable(name, "weight") for name in WEIGHTS), reduction="mean",
            micro_batches=(parts,), replayed=None if replicas == 1 else "one.npz", **about,
        ),
        name="one.npz" if replicas == 1 else "two.npz",
    )  # fmt: skip
    sent = []
    for replica in range(replicas):
        changes = (wrong or {}) if replica in (1, replicas - 1) else {}

        def changed(name, array, changes=changes):
            return np.asarray(changes.get(name, np.asarray)(array), np.float32)

        found = {kind: [] for kind in ("data", "y_pred", "y_grad", *OF_MODULES)}
        total, loss = 0.0, 0.0
        for rows in np.split(order[replica::replicas], parts):
            x, y = x_all[rows], y_all[rows]
            linear = changed("layers.0.linear", x @ w1.T + b1)
            act_input = changed("act input", linear)
            act = changed("layers.0.act", np.tanh(act_input))
            block = changed("layers.0", x + act)
            head = changed("head", block @ w2.T + b2)
            g_head = 2 * (head - y) / y.size / parts
            g_block = changed("head gradient", g_head @ w2)
            g_sum = changed("layers.0 gradient", g_block)
            g_linear = changed("layers.0.act gradient", g_sum * (1 - act**2))
            g_w1 = changed("layers.0.linear weight", g_linear.T @ x)
            own = [g_w1, g_linear.sum(0), g_head.T @ block, g_head.sum(0)]
            total = [a + b for a, b in zip(own, total, strict=True)] if total else own
            loss = loss + np.sum((head - y) ** 2) / y.size / parts
            g_x = g_linear @ w1
            of = {  # As in `OF_MODULES`: input, output, and their gradients.
                "layers.0": (x, block, g_x + g_sum, g_block),
                "layers.0.linear": (x, linear, g_x, g_linear),
                "layers.0.act": (act_input, act, g_linear, g_sum),
                "head": (block, head, g_block, g_head),
            }
            for kind, array in (("data", x), ("y_pred", head), ("y_grad", g_head)):
                found[kind].append(array)
            for i, kind in enumerate(OF_MODULES):
                found[kind] += [of[name][i] for name in modules]
        sent.append(total)
        for kind, arrays in {**found, "loss": [loss], "raw": total, "before": weights}.items():
            trace.put(0, kind, replica, [np.asarray(a, np.float32) for a in arrays])
    mean = [sum(own) / replicas for own in zip(*sent, strict=True)]
    after = [np.float32(w - 0.1 * g) for w, g in zip(weights, mean, strict=True)]
    for replica in range(replicas):
        trace.put(0, "after", replica, after)
    return trace


def unequal(array):
    return array * np.linspace(0.5, 1.5, array.shape[-1])


BIAS = trained().named(0, "before", 0)["head.bias"]
PLACES = {
    "layers.0.linear": "layers.0.linear, forward", "layers.0.act": "layers.0.act, forward",
    "act input": "layers.0, forward", "layers.0": "layers.0, forward",
    "head": "head, forward", "head gradient": "head, backward",
    "layers.0 gradient": "layers.0, backward",
    "layers.0.act gradient": "layers.0.act, backward",
    "layers.0.linear weight": "layers.0.linear, backward",
}  # fmt: skip
CASES = {  # Name: both, the second one, the module.
    "right": ({}, {}, ""),
    "right without modules": ({}, {"modules": ()}, ""),
    "right in parts": ({}, {"parts": 3, "modules": ("head", "layers.0.linear")}, ""),
    **{
        place: ({}, {"parts": 1 + number % 2, "wrong": {place: unequal}}, module)
        for number, (place, module) in enumerate(PLACES.items())
    },
    "only the head": (
        {"modules": ("head",)}, {"wrong": {"layers.0.act": unequal}}, "before head, forward"),
    "between two": (
        {"modules": ("layers.0.act", "head")}, {"wrong": {"layers.0 gradient": unequal}},
        "after layers.0.act, backward"),
    "a repeated bias": ({}, {"wrong": {"head": lambda y: y + BIAS}}, "head, forward"),
    "16 bits": (
        {"computed_in": "bfloat16"}, {"wrong": {"layers.0.linear weight": lambda g: g * 1.2}},
        "layers.0.linear, backward"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_first_wrong_module_is_said_with_its_pass(name):
    both, second, module = CASES[name]
    verdict = verify(trained(**both), trained(replicas=2, **both | second))
    assert verdict.ok == (not module), verdict
    assert not module or verdict.place.module == module
    assert not module or verdict.place.node in ("outputs", "loss", "gradient", "sum")


# --- Parts of arrays on the ranks of one replica -------------------------------------------------


def blocks(array):
    return array[:, ::2], array[:, 1::2]


def summands(array):
    part = np.sin(np.arange(array.size, dtype=np.float32)).reshape(array.shape)
    return part, array - part


def half(array):
    return array / 2


def parts_of(*factors):
    return lambda gradient: [factor * gradient for factor in factors]


# What is wrong on both, as in `trained`; kind → module → function that returns the arrays of both
# ranks, which have parts of some; and the module that is said, or None if all are right.
ON_RANKS = {
    "parts and sums": (
        {}, {"module_out": {
            "layers.0.linear": lambda a: (a[:, :3], a[:, 3:]), "layers.0.act": summands}}, None),
    "blocks": ({}, {"module_out": {"layers.0.linear": blocks}}, None),
    "gradients": ({}, {"module_in_grad": {"head": summands, "layers.0.act": blocks}}, None),
    "not reduced": ({"layers.0": half}, {"module_out": {"layers.0.act": summands}},
        "layers.0.act, forward"),
    "not reduced backward": (
        {"head gradient": half}, {"module_in_grad": {"head": parts_of(1.5, 0.5)}},
        "head, backward"),
    "a mean backward": ({"head gradient": half}, {"module_in_grad": {"head": parts_of(1, 1)}},
        "head, backward"),
    "a bias on each": (
        {"head": lambda y: y + BIAS},
        {"module_out": {"head": lambda y: [part + BIAS for part in summands(y - BIAS)]}},
        "head, forward"),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_RANKS)
def test_parts_of_arrays_of_modules_on_ranks(name):
    wrong, changes, module = ON_RANKS[name]
    second, views = trained(wrong=wrong), {}
    for kind, of_module in changes.items():
        for changed, arrays_of in of_module.items():
            place = f"1/{kind}/0/{MODULES.index(changed)}"
            views[place] = arrays_of(second.stored()[place])
            second.stored()[place] = views[place][0]
    verdict = verify(trained(), on_two_ranks(second, views))
    assert (verdict.status == FAULT) == (module is not None), verdict
    assert module is None or verdict.place.module == module
