"""Recordings with inputs and outputs of modules: the first wrong one is named."""

import dataclasses
import json
import pathlib
import random
from typing import NamedTuple

import numpy as np
import pytest

from conftest import ROOT
from lockstep.answer.json import record_of
from lockstep.comparison import compare_traces
from lockstep.context import Context
from lockstep.data import file as trace_file
from lockstep.data.trace import OF_MODULES, About, Trace, Variable
from lockstep.numeric.tolerance import Tolerance
from lockstep.reference import StepPair, match_traces
from lockstep.stages.module_arrays import Event, events_of
from lockstep.stages.modules import first_wrong_module
from recorder_scripts import FOLDER, needs, run_script

NUM, WIDTH, CLASSES = 12, 6, 4
MODULES = ("layers.0", "layers.0.linear", "layers.0.act", "head")
WEIGHTS = ("layers.0.linear.weight", "layers.0.linear.bias", "head.weight", "head.bias")


def trained(*, replicas=1, parts=1, order=None, modules=MODULES, wrong=None, **about):
    """Returns a recording of a step of `head(x + act(linear(x)))`.

    Args:
        parts: number of micro-batches.
        order: order of the examples.
        modules: the recorded ones.
        wrong: array in the recording, such as "layers.0.act" or "head gradient" → function that
            changes it on replica 1; "x" and "x gradient" are those between the modules.
    """
    generator = np.random.default_rng(0)
    x_all, y_all = (generator.normal(size=(NUM, n)).astype(np.float32) for n in (WIDTH, CLASSES))
    shapes = (WIDTH, WIDTH), (WIDTH,), (CLASSES, WIDTH), (CLASSES,)
    w1, b1, w2, b2 = weights = [generator.normal(size=s).astype(np.float32) for s in shapes]
    order = np.arange(NUM) if order is None else order
    trace = Trace(
        About(
            "torch", replicas, steps=(0,), modules=tuple(modules), gradients=WEIGHTS,
            variables=tuple(Variable(name, "weight") for name in WEIGHTS), reduction="mean",
            micro_batches=(parts,), replayed=None if replicas == 1 else "one.npz", **about,
        ),
        name="one.npz" if replicas == 1 else "two.npz",
    )  # fmt: skip
    for replica in range(replicas):
        changes = (wrong or {}) if replica in (1, replicas - 1) else {}

        def changed(name, array, changes=changes):
            return np.asarray(changes.get(name, np.asarray)(array), np.float32)

        found = {kind: [] for kind in ("data", "y_pred", "y_grad", "loss", *OF_MODULES)}
        total = 0.0
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
            g_x = changed("layers.0.linear gradient", g_linear @ w1)
            own = [g_w1, g_linear.sum(0), g_head.T @ block, g_head.sum(0)]
            total = [a + b for a, b in zip(own, total, strict=True)] if total else own
            of = {
                "layers.0": (x, block, g_block, g_x + g_sum),
                "layers.0.linear": (x, linear, g_linear, g_x),
                "layers.0.act": (act_input, act, g_sum, g_linear),
                "head": (block, head, g_head, g_block),
            }
            for kind, values in (("data", x), ("y_pred", head), ("y_grad", g_head)):
                found[kind].append(values)
            found["loss"] = [sum(found["loss"]) + np.sum((head - y) ** 2) / y.size / parts]
            for i, kind in enumerate(("module_in", "module_out", "module_out_grad")):
                found[kind] += [of[name][i] for name in modules]
            found["module_in_grad"] += [of[name][3] for name in modules]
        for kind, arrays in {**found, "raw": total, "before": weights, "after": weights}.items():
            trace.put(0, kind, replica, [np.asarray(a, np.float32) for a in arrays])
    return trace


def verdict_of(second, first=None):
    *_, verdict = compare_traces([first or trained(), second], {}, 1e-5).values()
    return verdict


def modules_of(verdict):
    stages = "forward", "loss", "gradients"
    return {finding.module for finding in verdict.faults if finding.stage in stages}


def test_events_are_in_the_order_of_time():
    names = [*MODULES[:3], "layers.10", "head"]
    calls = [Event("layers.0", False), Event("layers.0.linear", False)]
    calls += [Event("layers.0.linear", True), Event("layers.0.act", False)]
    calls += [Event("layers.0.act", True), Event("layers.0", True)]
    assert events_of(names)[:6] == calls
    assert events_of(names)[6:8] == [Event("layers.10", False), Event("layers.10", True)]


@pytest.mark.parametrize("options", [
    {}, {"parts": 3}, {"order": np.random.default_rng(1).permutation(NUM)},
    {"parts": 2, "modules": ("head", "layers.0.linear")}, {"modules": ()},
])  # fmt: skip
def test_right_programs_are_clean(options):
    assert verdict_of(trained(replicas=2, **options)).faults == []


@pytest.mark.parametrize(("place", "expected"), [
    ("layers.0.linear", "layers.0.linear, forward"), ("layers.0.act", "layers.0.act, forward"),
    ("act input", "layers.0, forward"), ("layers.0", "layers.0, forward"),
    ("head", "head, forward"), ("head gradient", "head, backward"),
    ("layers.0 gradient", "layers.0, backward"),
    ("layers.0.act gradient", "layers.0.act, backward"),
    ("layers.0.linear weight", "layers.0.linear, backward"),
])  # fmt: skip
@pytest.mark.parametrize("parts", [1, 2])
def test_the_first_wrong_module_is_named(place, expected, parts):
    def wrong(array):
        return array * np.linspace(0.5, 1.5, array.shape[-1])

    order = np.random.default_rng(1).permutation(NUM)
    second = trained(replicas=2, parts=parts, order=order, wrong={place: wrong})
    verdict = verdict_of(second)
    assert modules_of(verdict) == {expected}, str(verdict)
    (cause,) = {finding.detail for finding in verdict.faults if finding.module}
    assert cause == ("other_outputs" if "forward" in expected else "other_backward")
    assert expected in {finding["module"] for finding in record_of(verdict)["findings"]}
    if place != "layers.0.linear weight":
        assert verdict.faults[0].items == ("replica 1",)


def test_modules_that_are_recorded_by_a_pattern_are_named_by_their_side():
    def twice(array):
        return 2 * array

    first = trained(modules=("head",))
    second = trained(replicas=2, modules=("head",), wrong={"layers.0.act": twice})
    assert modules_of(verdict_of(second, first)) == {"before head, forward"}
    modules = ("layers.0.act", "head")
    second = trained(replicas=2, modules=modules, wrong={"layers.0 gradient": twice})
    verdict = verdict_of(second, trained(modules=modules))
    assert modules_of(verdict) == {"after layers.0.act, backward"}


def test_a_repeated_bias_and_a_factor_are_recognised():
    bias = trained().named(0, "before", 0)["head.bias"]
    verdict = verdict_of(trained(replicas=2, wrong={"head": lambda y: y + bias}))
    assert {f.detail for f in verdict.faults if f.module} == {"repeated_bias"}
    assert "head.bias is added 2 times" in verdict.faults[0].text
    verdict = verdict_of(trained(replicas=2, wrong={"head gradient": lambda g: 3 * g}))
    assert "it is 3 times the right one" in verdict.faults[0].text


def test_gradients_of_one_module_in_16_bits():
    about = {"computed_in": "bfloat16"}
    second = trained(replicas=2, wrong={"layers.0.linear weight": lambda g: g * 1.2}, **about)
    *_, verdict = compare_traces([trained(**about), second], {}).values()
    assert modules_of(verdict) == {"layers.0.linear, backward"}


class Held(NamedTuple):
    """An array of a rank."""

    array: np.ndarray

    def read(self):
        return self.array


def on_two_ranks(wrong=None, **changes):
    """Returns what is wrong if ranks of tensor parallelism have parts of some arrays.

    Args:
        wrong: see `trained`.
        changes: kind → module → function that returns the arrays of both ranks.
    """
    first, one = trained(), trained(wrong=wrong)
    about = dataclasses.replace(one.about, mesh={"tp": 2}, data_axes=(), replayed="one.npz")
    second, views = Trace(about, one.stored(), "two.npz"), {}
    for kind in ("before", "after"):
        second.put(0, kind, 1, second.arrays(0, kind, 0))
    for kind, of_module in changes.items():
        for module, parts_of in of_module.items():
            name = f"1/{kind}/0/{MODULES.index(module)}"
            parts = parts_of(second.stored()[name])
            second.stored()[name] = parts[0]
            views[name] = {rank: Held(part) for rank, part in enumerate(parts)}
    second.views_of = views
    steps = Context(first, 0), Context(second, 0)
    return first_wrong_module(
        StepPair(*steps, match_traces(first, second, {}), Tolerance(given=1e-5))
    )


def columns(array):
    return array[:, :3], array[:, 3:]


def blocks(array):
    return array[:, ::2], array[:, 1::2]


def summands(array):
    part = np.sin(np.arange(array.size, dtype=np.float32)).reshape(array.shape)
    return part, array - part


def test_parts_and_sums_of_ranks_are_those_of_the_reference():
    assert on_two_ranks(module_out={"layers.0.linear": columns, "layers.0.act": summands}) is None
    assert on_two_ranks(module_out={"layers.0.linear": blocks}) is None
    assert on_two_ranks(module_in_grad={"head": summands, "layers.0.act": blocks}) is None


def test_sums_that_are_not_reduced_are_named():
    def half(array):
        return array / 2

    found = on_two_ranks({"layers.0": half}, module_out={"layers.0.act": summands})
    assert (found.module, found.detail) == ("layers.0.act, forward", "partial_not_reduced")
    for parts, cause in (((1.5, 0.5), "forgotten_backward_sum"), ((1, 1), "mean_instead_of_sum")):
        of_head = {"head": lambda g, parts=parts: [part * g for part in parts]}
        found = on_two_ranks({"head gradient": half}, module_in_grad=of_head)
        assert (found.module, found.detail) == ("head, backward", cause)
    bias = trained().named(0, "before", 0)["head.bias"]
    found = on_two_ranks(
        module_out={"head": lambda y: [part + bias for part in summands(y - bias)]}
    )
    assert (found.module, found.detail) == ("head, forward", "partial_not_reduced")
    assert "without head.bias" in found.text


def run_jobs(folder, jobs):
    """Records trainings with PyTorch: those of one process, then those of two."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run_script("torch", FOLDER / "torch_modules.py", folder, timeout=300).check_returncode()


@pytest.mark.slow
@needs("torch")
def test_recording_modules_changes_no_bit(tmp_path):
    jobs = [
        {"network": network, "path": f"any{size}.npz", "modules": modules, "size": size, "steps": 3,
         "weights": f"{network}{modules}{size}.npz"}
        for network in ("gpt", "cnn")
        for modules in (None, True, "*.mlp")
        for size in (1, 2)
        if not (network == "cnn" and modules == "*.mlp")
    ]  # fmt: skip
    run_jobs(tmp_path, jobs)
    for job in jobs:
        plain = f"{job['network']}None{job['size']}.npz"
        with np.load(tmp_path / job["weights"]) as own, np.load(tmp_path / plain) as other:
            assert all(own[name].tobytes() == other[name].tobytes() for name in other)
    recorded = trace_file.load(tmp_path / "any2.npz")
    assert recorded.about.modules[:2] == ("stem", "layers")


def is_named(verdict, module):
    found = [f.module for f in verdict.faults if f.stage in ("forward", "gradients")]
    return bool(found) and all(each.startswith(f"{module}, ") for each in found)


ROW, COLUMN = "return leave(y, self.tp) + self.bias", "F.linear(enter(x, self.tp),"
ON_A_MESH = {  # Line of the script → its replacement, and what is found.
    "right": ("", "", None, ""),
    "not reduced": (ROW, "return y + self.bias", "layers.0.attention.wo", "partial_not_reduced"),
    "a mean": (
        ROW, "return leave(y, self.tp) / 2 + self.bias", "layers.0.attention.wo", "other_outputs"),
    "a bias of each rank": (
        ROW, "return leave(y + self.bias, self.tp)", "layers.0.attention.wo", "repeated_bias"),
    "gradients not reduced": (
        COLUMN, "F.linear(x,", "layers.1.feed_forward.up", "partial_not_reduced"),
}  # fmt: skip


@pytest.mark.slow
@needs("torch")
def test_modules_of_tensor_parallelism_are_named(tmp_path):
    scripts = ROOT / "tests" / "zoo" / "scripts"
    text = (scripts / "torch_tp.py").read_text()

    def recorded(name, script, size, replay=None):
        path = tmp_path / f"{name}.npz"
        (tmp_path / "script.py").write_text(script)
        given = {"path": str(path), "steps": [0], "replay": replay, "permute": None}
        run_script(
            "torch", tmp_path / "script.py", size, path, timeout=100,
            PYTHONPATH=f"{ROOT}:{scripts}", LOCKSTEP_RECORD=json.dumps({**given, "modules": True}),
        ).check_returncode()  # fmt: skip
        return path

    one = recorded("one", text, 1)
    for name, (line, new, module, cause) in ON_A_MESH.items():
        assert line in text
        path = recorded(name, text.replace(line, new) if line else text, 2, str(one))
        *_, verdict = compare_traces([trace_file.load(p) for p in (one, path)], {}).values()
        if module is None:
            assert verdict.ok, str(verdict)
        else:
            found = [f for f in verdict.faults if f.module]
            assert (found[0].module.split(",")[0], found[0].detail) == (module, cause), str(verdict)


GPT = [
    f"layers.{i}{name}"
    for i in (0, 1)
    for name in (
        *("", ".norm_1", ".norm_2", ".mlp", ".mlp.0", ".mlp.1", ".mlp.2", ".attention"),
        *(f".attention.{name}" for name in ("wq", "wk", "wv", "wo")),
    )
]
CNN = [f"layers.{i}.{name}" for i in (0, 1) for name in ("conv_1", "norm_1", "conv_2", "norm_2")]
FAULTS = (
    *("scaled", "shifted", "permuted", "noise"),
    *("input gradient", "detached", "output gradient"),
)


@pytest.mark.slow
@needs("torch")
def test_modules_of_pytorch_are_named(tmp_path: pathlib.Path):
    generator, jobs = random.Random(0), []
    for network, dtype in (("gpt", ""), ("gpt", "bfloat16"), ("cnn", "")):
        one = f"{network}{dtype}.npz"
        common = {"network": network, "dtype": dtype}
        jobs.append(common | {"path": one, "size": 1})
        jobs.append(common | {"path": f"two{one}", "replay": one})
        for number in range(10):
            module = generator.choice([*(GPT if network == "gpt" else CNN), "head"])
            fault = module, generator.choice(FAULTS)
            path = f"wrong{number}{one}"
            jobs.append(common | {"path": path, "replay": one, "fault": fault})
    run_jobs(tmp_path, jobs)
    unnamed = []
    for job in jobs:
        traces = [
            trace_file.load(tmp_path / job.get(key, job["path"])) for key in ("replay", "path")
        ]
        verdict = [*compare_traces(traces, {}).values()][-1]
        if "fault" not in job:
            assert verdict.ok, str(verdict)
        elif not is_named(verdict, job["fault"][0]):
            unnamed.append((job["network"], *job["fault"], str(verdict)))
    assert not unnamed
