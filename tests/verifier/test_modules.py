"""Recordings of modules: parts on ranks, and networks of PyTorch."""

import json
import random

import numpy as np
import pytest

from cases.heads import FOLDER
from lockstep.comparison import compare_traces
from lockstep.data import file as trace_file
from lockstep.engine.modules import Event, events_of
from lockstep.engine.verdict import FAULT
from tests.verifier.modules import CASES, MODULES, ON_RANKS, on_two_ranks, verdict_of
from tests.verifier.recorder_scripts import needs


def test_events_are_in_the_order_of_time():
    names = [*MODULES[:3], "layers.10", "head"]
    calls = [Event("layers.0", False), Event("layers.0.linear", False)]
    calls += [Event("layers.0.linear", True), Event("layers.0.act", False)]
    calls += [Event("layers.0.act", True), Event("layers.0", True)]
    assert events_of(names)[:6] == calls
    assert events_of(names)[6:8] == [Event("layers.10", False), Event("layers.10", True)]


@pytest.mark.parametrize("name", CASES)
def test_the_first_wrong_module_is_said_with_its_pass(name):
    both, second, module = CASES[name]
    verdict = verdict_of(both, second)
    assert verdict.ok == (not module), verdict
    assert not module or verdict.place.module == module
    assert not module or verdict.place.node in ("outputs", "loss", "gradient", "sum")


@pytest.mark.parametrize("name", ON_RANKS)
def test_parts_of_arrays_of_modules_on_ranks(name):
    wrong, parts, module = ON_RANKS[name]
    verdict = on_two_ranks(wrong, **parts)
    assert (verdict.status == FAULT) == (module is not None), verdict
    assert module is None or verdict.place.module == module


@pytest.fixture
def run_jobs(scripts, tmp_path):
    """Returns a function that trains with PyTorch: first in one process, then in two."""

    def run(jobs):
        (tmp_path / "jobs.json").write_text(json.dumps(jobs))
        for processes in (1, 2):
            code, printed = scripts(
                "torch", "torch_modules.py", folder=tmp_path, processes=processes
            )
            assert code == 0, printed

    return run


@pytest.mark.slow
@needs("torch")
def test_recording_modules_changes_no_bit(run_jobs, tmp_path):
    jobs = [
        {"network": network, "path": f"any{size}.npz", "modules": modules, "size": size, "steps": 3,
         "weights": f"{network}{modules}{size}.npz"}
        for network in ("gpt", "cnn")
        for modules in (None, True, "*.mlp")
        for size in (1, 2)
        if not (network == "cnn" and modules == "*.mlp")
    ]  # fmt: skip
    run_jobs(jobs)
    for job in jobs:
        plain = f"{job['network']}None{job['size']}.npz"
        with np.load(tmp_path / job["weights"]) as own, np.load(tmp_path / plain) as other:
            assert all(own[name].tobytes() == other[name].tobytes() for name in other)
    recorded = trace_file.load(tmp_path / "any2.npz")
    assert recorded.about.modules[:2] == ("stem", "layers")


ROW, COLUMN = "return leave(y, self.tp) + self.bias", "F.linear(enter(x, self.tp),"
ON_A_MESH = {  # Line of the script → its replacement, and the module that is found.
    "right": ("", "", None),
    "not reduced": (ROW, "return y + self.bias", "layers.0.attention.wo"),
    "a mean": (ROW, "return leave(y, self.tp) / 2 + self.bias", "layers.0.attention.wo"),
    "a bias of each rank": (
        ROW, "return leave(y + self.bias, self.tp)", "layers.0.attention.wo"),
    "gradients not reduced": (COLUMN, "F.linear(x,", "layers.1.feed_forward.up"),
}  # fmt: skip


@pytest.mark.slow
@needs("torch")
def test_modules_of_tensor_parallelism_are_named(scripts, tmp_path):
    text = (FOLDER / "programs" / "torch_tp.py").read_text()

    def recorded(name, script, size, replay=None):
        path = tmp_path / f"{name}.npz"
        (tmp_path / "script.py").write_text(script)
        given = {"path": str(path), "steps": [0], "replay": replay, "permute": None}
        variable = {"LOCKSTEP_RECORD": json.dumps({**given, "modules": True})}
        words = "torch", tmp_path / "script.py"
        code, printed = scripts(*words, folder=tmp_path, processes=size, **variable)
        assert code == 0, printed
        return path

    one = recorded("one", text, 1)
    for name, (line, new, module) in ON_A_MESH.items():
        assert line in text
        path = recorded(name, text.replace(line, new) if line else text, 2, str(one))
        *_, verdict = compare_traces([trace_file.load(p) for p in (one, path)], {}).values()
        if module is None:
            assert verdict.ok, str(verdict)
        else:
            assert verdict.place.module.split(",")[0] == module, (name, verdict)


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
def test_modules_of_pytorch_are_named(run_jobs, tmp_path):
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
    run_jobs(jobs)
    unnamed = []
    for job in jobs:
        traces = [
            trace_file.load(tmp_path / job.get(key, job["path"])) for key in ("replay", "path")
        ]
        verdict = [*compare_traces(traces, {}).values()][-1]
        if "fault" not in job:
            assert verdict.ok, str(verdict)
        elif not verdict.place.module.startswith(f"{job['fault'][0]}, "):
            unnamed.append((job["network"], *job["fault"], verdict.place))
    assert not unnamed
