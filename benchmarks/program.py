"""Trains with one framework and answers requests: every program of the benchmark.

    python benchmarks/program.py torch_ddp --model=lenet --num_steps=235 --data_dir=DIR

It warms up after its start and writes a line of JSON. Then it answers each line of standard input:

    (start)     {"versions": {"python": "3.11.7", …}}
    steps       {"sec": 7.4, "images": 60000}     after `--num_steps` steps
    evaluate    {"accuracy": 0.78}

A framework is a class `Training` in a module of this folder, which is imported with the
interpreter that has the framework. It has `versions`, `train_steps(num_steps)`,
which returns the number of images, and `evaluate()`, which returns the test accuracy.
"""

import argparse
import dataclasses
import functools
import importlib
import itertools
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "frameworks"), str(ROOT / "examples")]

import common

MODULES = {
    "lockstep": "with_lockstep", "d2l": "with_d2l", "keras": "with_keras", "jax": "with_jax",
    "torch_ddp": "with_torch", "torch_fsdp": "with_torch",
}  # fmt: skip
NUM_PARAMETERS = {"lenet": 129_068, "resnet18": 11_175_818}  # Trainable parameters.
NUM_WARMUP_STEPS = 3
StepFunction = Callable[[np.ndarray], None]


@dataclasses.dataclass(frozen=True)
class Job:
    """The training of a program: its flags, and Fashion-MNIST.

    Attributes:
        num_steps: steps of a request.
        num_devices: number of logical devices or processes.
        precision: "float32" or "bfloat16", the compute dtype of the layers.
    """

    framework: str
    model: str
    global_batch_size: int
    num_steps: int
    num_devices: int
    data_dir: str
    precision: str
    recipe: str
    strategy: str

    @property
    def learning_rate(self) -> float:
        """The learning rate of plain SGD; of recipe `fast`, the peak."""
        return common.LEARNING_RATES[self.model]

    @functools.cached_property
    def data(self) -> tuple[common.Batch, common.Batch]:
        """Images (n, 28, 28, 1) of bytes and labels (n,), for training and for the test."""
        return common.read_fashion_mnist(self.data_dir)

    def epoch_slices(self) -> list[slice]:
        """Returns the batches of an epoch; a short last one only if it has equal parts."""
        end, size = len(self.data[0][1]), self.global_batch_size
        slices = [slice(start, min(start + size, end)) for start in range(0, end, size)]
        last = slices[-1]
        return slices if (last.stop - last.start) % self.num_devices == 0 else slices[:-1]

    def index_batches(self) -> Iterator[np.ndarray]:
        """Yields the example indices of each global batch, forever, reshuffled in each epoch."""
        generator, slices = np.random.default_rng(0), self.epoch_slices()
        while True:
            order = generator.permutation(len(self.data[0][1]))
            for where in slices:
                yield order[where]

    def train(self, batches: Iterator[np.ndarray], num_steps: int, make_step: StepFunction) -> int:
        """Makes a step on each of some batches of indices; returns the number of images."""
        num_images = 0
        for rows in itertools.islice(batches, num_steps):
            make_step(rows)
            num_images += len(rows)
        return num_images

    def check_parameters(self, number: int) -> None:
        """Raises an error unless the network has the parameters that all programs train."""
        if number != NUM_PARAMETERS[self.model]:
            raise AssertionError(f"{self.model} has {number} trainable parameters")


def parse(arguments: Sequence[str]) -> Job:
    """Returns the training for the words of a command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("framework", choices=MODULES)
    parser.add_argument("--model", choices=NUM_PARAMETERS, default="lenet")
    parser.add_argument("--global_batch_size", type=int, default=256)
    parser.add_argument("--num_steps", type=int, default=100)
    parser.add_argument("--num_devices", type=int, default=2)
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--recipe", choices=["d2l", "fast"], default="d2l")
    parser.add_argument("--strategy", default="manual")
    return Job(**vars(parser.parse_args(arguments)))


def num_threads(job: Job) -> int:
    """Returns a device's share of the cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, cores // job.num_devices)


def main() -> None:
    """Warms up, then answers requests until they end. Other output goes to standard error."""
    job = parse(sys.argv[1:])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    training = importlib.import_module(MODULES[job.framework]).Training(job)
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    print(json.dumps({"versions": versions | training.versions}), file=answers, flush=True)
    for line in sys.stdin:
        if line.strip() == "steps":
            start = time.perf_counter()
            images = training.train_steps(job.num_steps)
            answer = {"sec": time.perf_counter() - start, "images": images}
        else:
            answer = {"accuracy": training.evaluate()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
