"""The recorder of PyTorch in trainings with Accelerate, Transformers' Trainer and Lightning.

The examples run where an interpreter has the package.
"""

import re

import pytest

from lockstep import compare
from tests.conftest import ROOT
from tests.verifier.recorder_scripts import needs
from tests.verifier.recorder_scripts.recording import node_of

# Example → its package, and the last argument of the second run → the node of the fault.
EXAMPLES = {
    "record_accelerate": (
        "accelerate", {"": "", "unwrapped": "sum", "scheduler": "update", "clip": "gradient"}
    ),
    "record_hf_trainer": ("transformers", {"": "", "tokens": "loss"}),
    "record_lightning": (
        "lightning", {"": "", "manual": "", "no_sync": "sum", "sampler": "examples"}
    ),
}  # fmt: skip

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=needs(package)) for name, (package, _) in EXAMPLES.items()]
)
def test_integration(example, run, tmp_path):
    package, cases = EXAMPLES[example]
    program = ROOT / "examples" / f"{example}.py"
    one, two = str(tmp_path / "one.npz"), str(tmp_path / "two.npz")
    run(package, program, one)
    run(package, program, two, processes=2)
    assert compare(one, two).ok
    for bug, expected in cases.items():
        run(package, program, two, one, bug, processes=2)
        assert node_of(compare(one, two)) == expected, bug


@pytest.mark.slow
@pytest.mark.parametrize("framework", [pytest.param(name, marks=needs(name)) for name in PAGE])
def test_the_lines_of_the_page_make_one_process_and_two_comparable(framework, run, tmp_path):
    """The lines of the page "Make one process and N comparable", as they are written."""
    text = (ROOT / "docs" / "comparable.md").read_text(encoding="utf-8")
    first_word = {"torch": "torch.manual_seed", "accelerate": "set_seed"}[framework]
    (lines,) = re.findall(rf"```python\n({re.escape(first_word)}.*?)```", text, re.DOTALL)
    before, after = PAGE[framework]
    program = tmp_path / "train.py"
    program.write_text(PYTORCH + before + lines + after + LOOP, encoding="utf-8")
    one, two = str(tmp_path / "one.npz"), str(tmp_path / "two.npz")
    run(framework, program, one)
    run(framework, program, two, one, processes=2)
    verdict = compare(one, two)
    assert verdict.status == "clean" and not verdict.notes, str(verdict)
