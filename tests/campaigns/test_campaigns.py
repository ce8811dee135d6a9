"""A short run of each campaign; what they need of the machine is a reason to skip it."""

import inspect
import shutil
import subprocess
import sys

import keras
import pytest

from cases.runner import python_of
from lockstep.engine.verdict import CLEAN, NODES
from tests.campaigns import CampaignError, fuzz, mutations, network, optimizers, sensitivity
from tests.conftest import ROOT


def test_the_lists_of_bugs_fit_the_program():
    """`old` occurs once, and the program with `new` can still be compiled; drawn ones, too."""
    listed, drawn, wrong = mutations.listed(), mutations.drawn(60, seed=1), []
    for mutation in [*listed, *drawn]:
        source = (ROOT / mutation.file).read_text("utf-8")
        try:
            compile(mutation.changed(source), mutation.file, "exec")
        except (CampaignError, SyntaxError) as error:
            wrong.append(f"{mutation.file}: {mutation.name}: {error}")
    assert not wrong, "\n".join(wrong)
    assert sum(bug.file.startswith("lockstep/") for bug in drawn) == 30


def test_a_bug_is_drawn_of_each_kind():
    kinds = {  # Statement → what it becomes.
        "self.count += len(items)": "pass", "self.items[0] = 1": "pass", "items.sort()": "pass",
        "x = 3": "x = 4", "x = a <= b": "x = a < b", "assert x": "assert not (x)",
        "x = [i for i in a if i]": "x = [i for i in a if not (i)]",
    }  # fmt: skip
    for old, new in kinds.items():
        assert new in {old[:a] + new + old[b:] for a, b, new in mutations.changes(old)}


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_bad_input_is_refused_in_a_line(target):
    outcomes = fuzz.fuzz(target, examples=60, seed=1)
    assert outcomes["refused"] > 10 and outcomes["accepted"] > 0


def test_faults_of_each_size_can_be_injected():
    for fault, nodes in sensitivity.NODES.items():
        compile(sensitivity.source_of(FAULT=fault, SIZE=0.1), fault, "exec")
        assert not {*nodes} - {*NODES}


def test_every_optimizer_of_keras_is_tried():
    with_others = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
    of_keras = {
        name
        for name, kind in inspect.getmembers(keras.optimizers, inspect.isclass)
        if issubclass(kind, keras.optimizers.Optimizer) and name not in with_others
    }
    tried = {type(create()).__name__ for create in optimizers.OPTIMIZERS.values()}
    assert of_keras == tried and len(optimizers.PAIRS) == 4 * 2 * len(tried)


@pytest.mark.slow
@pytest.mark.parametrize(("clipping", "is_clean"), [({}, True), ({"clipnorm": 0.01}, False)])
def test_a_right_pair_is_clean_and_a_wrong_one_is_not(monkeypatch, clipping, is_clean):
    for name, value in {"NUM_STEPS": 1, "NUM_REPLICAS": 2, "GLOBAL_BATCH_SIZE": 10}.items():
        monkeypatch.setattr(optimizers, name, value)
    clipped = {"nesterov": lambda: keras.optimizers.SGD(0.1, **clipping)}
    monkeypatch.setattr(optimizers, "OPTIMIZERS", clipped)
    status, _ = optimizers.search("attention/nesterov/mixed_bfloat16", seed=1)
    assert (status == CLEAN) == is_clean
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        *("kills --cycles=2 --seed=3 --only=manual", "bits --cycles=20"),
        "network --only=worker-killed",
        "sensitivity --only=whole-loss",
        "bounds --cycles=1 --seed=0 --only=MLP",
    ],
)
def test_a_short_campaign(words):
    if words.startswith("network") and (reason := network.unavailable()):
        pytest.skip(reason)
    if words.startswith(("sensitivity", "bounds")) and not shutil.which(python_of("torch")):
        pytest.skip("no interpreter with PyTorch: make frameworks")
    command = [sys.executable, "-m", "tests.campaigns", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": all held; " in done.stdout.splitlines()[-1]
