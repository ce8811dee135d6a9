"""The recorder of PyTorch in trainings with Accelerate, Transformers' Trainer and Lightning.

The examples run where an interpreter has the package, that of the tests or
`LOCKSTEP_ACCELERATE_PYTHON`, `LOCKSTEP_TRANSFORMERS_PYTHON` or `LOCKSTEP_LIGHTNING_PYTHON`.
"""

import os
import pathlib
import subprocess

import pytest

from lockstep import compare
from recorder_scripts import interpreter

ROOT = pathlib.Path(__file__).parents[1]
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


def run(python, example, num_processes, *arguments):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    done = subprocess.run(
        [python, *(launcher if num_processes > 1 else []), ROOT / f"examples/{example}.py",
         *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_integration(example, tmp_path):
    package, cases = EXAMPLES[example]
    python = interpreter(package)
    if not python:
        pytest.skip(f"needs {package}")
    one, two = str(tmp_path / "one.npz"), str(tmp_path / "two.npz")
    run(python, example, 1, one)
    run(python, example, 2, two)
    assert compare(one, two).ok
    for bug, expected in cases.items():
        run(python, example, 2, two, one, bug)
        found = compare(one, two).faults
        assert {(fault.stage, fault.cause) for fault in found} == expected, bug
