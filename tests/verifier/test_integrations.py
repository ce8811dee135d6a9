"""The recorder of PyTorch in trainings with Accelerate, Transformers' Trainer and Lightning.

The examples run where an interpreter has the package.
"""

import json
import re

import pytest

from lockstep import compare
from tests.campaigns import trainers
from tests.conftest import ROOT
from tests.verifier.recorder_scripts import MODULES, needs

# Example → its package, and the last argument of the second run → the faults that are found.
EXAMPLES = {
    "record_accelerate": (
        "accelerate",
        {
            "": set(),
            "unwrapped": {("all-reduce", "not_all_reduced")},
            "scheduler": {("update", "other_learning_rate")},
            "clip": {("gradients", "clipped_in_each_micro_batch")},
        },
    ),
    "record_hf_trainer": (
        "transformers",
        {"": set(), "tokens": {("loss", "mean_of_means"), ("gradients", "mean_of_means")}},
    ),
    "record_lightning": (
        "lightning",
        {
            "": set(),
            "manual": set(),
            "no_sync": {("all-reduce", "not_all_reduced")},
            "sampler": {("examples", "same_examples"), ("examples", "other_examples")},
        },
    ),
}

# The scripts of `examples/trainers` that `make frameworks` can run; the campaign runs all.
OF_FRAMEWORKS = [each for each in trainers.TRAINERS if each.package in MODULES]


# A training around the lines of the page: its start, and its end.
PYTORCH = """
import os, sys
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from lockstep import record_torch

GLOBAL_BATCH_SIZE = 8
dataset = TensorDataset(torch.randn(22, 6, generator=torch.Generator().manual_seed(3)))
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

def build_model():
    return nn.Linear(6, 2)
"""
LOOP = """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
path, *replay = sys.argv[1:]
with record_torch.record(path, model, optimizer, steps=4, replay=(replay or [None])[0]):
    for epoch in range(2):
        set_epoch(epoch)
        for (x,) in loader:
            loss = model(x).square().mean()
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
"""
PAGE = {  # Framework → what is before and after its lines.
    "torch": (
        "os.environ.setdefault('MASTER_ADDR', 'localhost')\n"
        "os.environ.setdefault('MASTER_PORT', '0')\n"
        "torch.distributed.init_process_group('gloo', rank=rank, world_size=world_size)\n",
        "backward = torch.Tensor.backward\n",
    ),
    "accelerate": (
        "from accelerate import Accelerator\n"
        "from accelerate.utils import DataLoaderConfiguration, set_seed\n"
        "os.environ['ACCELERATE_USE_CPU'] = 'true'\n",
        "set_epoch, backward = loader.set_epoch, accelerator.backward\n",
    ),
}


@pytest.fixture
def run(scripts, tmp_path):
    """Returns a function that runs a program in a number of processes."""

    def run_program(package, program, num_processes, *arguments, **environment):
        options = {"folder": tmp_path, "processes": num_processes, "HF_HUB_OFFLINE": "1"}
        options |= environment
        code, printed = scripts(package, program, *arguments, **options)
        assert code == 0, printed[-3000:]

    return run_program


@pytest.mark.slow
@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=needs(package)) for name, (package, _) in EXAMPLES.items()]
)
def test_integration(example, run, tmp_path):
    package, cases = EXAMPLES[example]
    program = ROOT / "examples" / f"{example}.py"
    one, two = str(tmp_path / "one.npz"), str(tmp_path / "two.npz")
    run(package, program, 1, one)
    run(package, program, 2, two)
    assert compare(one, two).ok
    for bug, expected in cases.items():
        run(package, program, 2, two, one, bug)
        found = compare(one, two).faults
        assert {(fault.stage, fault.detail) for fault in found} == expected, bug


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    [pytest.param(each, marks=needs(each.package), id=each.script) for each in OF_FRAMEWORKS],
)
def test_trainer(trainer, run, tmp_path):
    one, two = str(tmp_path / "one.npz"), str(tmp_path / "two.npz")

    def record(num_processes, path, replay, *arguments):
        asked = json.dumps({"path": path, "replay": replay, "steps": 2})
        run(trainer.package, trainer.path, num_processes, *arguments, LOCKSTEP_RECORD=asked)

    record(1, one, None)
    for bug, mistake in {"": None, **trainer.wrong}.items():
        record(2, two, one, *filter(None, [bug]))
        verdict = compare(one, two)
        word = trainers.word_of(verdict, mistake)
        assert word == ("found" if mistake else "clean"), str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("framework", [pytest.param(name, marks=needs(name)) for name in PAGE])
def test_the_lines_of_the_page_make_one_process_and_two_comparable(framework, run, tmp_path):
    """The lines of "Make one process and N comparable", as they are written."""
    text = (ROOT / "docs" / "verify_scripts.md").read_text(encoding="utf-8")
    text = text.partition("## Make one process and N comparable")[2].partition("\n## ")[0]
    first_word = {"torch": "torch.manual_seed", "accelerate": "set_seed"}[framework]
    (lines,) = re.findall(rf"```python\n({re.escape(first_word)}.*?)```", text, re.DOTALL)
    before, after = PAGE[framework]
    program = tmp_path / "train.py"
    program.write_text(PYTORCH + before + lines + after + LOOP, encoding="utf-8")
    one, two = str(tmp_path / "one.npz"), str(tmp_path / "two.npz")
    run(framework, program, 1, one)
    run(framework, program, 2, two, one)
    verdict = compare(one, two)
    assert verdict.status == "clean" and not verdict.notes, str(verdict)
