"""Defines the protocol of the benchmark's programs: flags, Fashion-MNIST, requests and answers.

A program warms up after its start and writes one line of JSON. It then answers each line of JSON on
standard input with one on standard output:

    (start)                           {"ready": true, "versions": {...}, "num_parameters": 129068}
    {"do": "steps", "num_steps": 235} {"sec": 7.4, "images": 60000, "loss": 0.61}
    {"do": "evaluate"}                {"accuracy": 0.78, "sec": 0.6}

The program exits at the end of standard input. This module needs only the standard library and
NumPy, so that each framework's program runs in its own environment.
"""

import argparse
import ctypes
import dataclasses
import functools
import inspect
import json
import os
import pathlib
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import numpy as np

from benchmark_data import FashionMnist, load_fashion_mnist

LEARNING_RATES = {"lenet": 0.2, "resnet18": 0.1}  # Of d2l; constant.
NUM_PARAMETERS = {"lenet": 129_068, "resnet18": 11_175_818}  # Trainable parameters.
PRECISION_FLAG = {"precision": {"choices": ["float32", "bfloat16"], "default": "float32"}}
NUM_WARMUP_STEPS = 5
_PR_SET_PDEATHSIG = 1  # Reference: prctl(2).


@dataclasses.dataclass(frozen=True)
class BenchmarkJob:
    """The training of a program.

    Attributes:
        model: a key of `LEARNING_RATES`.
        global_batch_size: examples per step on all devices, a multiple of `num_shards`.
        num_devices: number of logical devices or processes.
        data: training and test data.
        num_shards: number of equal parts of a global batch.
        options: values of the program's own flags.
    """

    model: str
    global_batch_size: int
    num_devices: int
    data: FashionMnist
    num_shards: int
    options: Mapping[str, Any]

    @property
    def learning_rate(self) -> float:
        """The learning rate of plain SGD, constant."""
        return LEARNING_RATES[self.model]

    @property
    def per_replica_batch_size(self) -> int:
        """Examples per step on one device."""
        return self.global_batch_size // self.num_devices

    @functools.cached_property
    def epoch_slices(self) -> list[slice]:
        """The slice of each global batch in the order of an epoch.

        A short last batch is left out if it cannot be split into equal shards, also from
        `num_images`.
        """
        num_examples = len(self.data.train_images)
        starts = range(0, num_examples, self.global_batch_size)
        slices = [slice(s, min(s + self.global_batch_size, num_examples)) for s in starts]
        last = slices[-1]
        return slices if (last.stop - last.start) % self.num_shards == 0 else slices[:-1]

    def num_images(self, num_steps: int) -> int:
        """Returns the number of images of `num_steps` steps from the start of an epoch."""
        sizes = [s.stop - s.start for s in self.epoch_slices]
        num_epochs, rest = divmod(num_steps, len(sizes))
        return num_epochs * sum(sizes) + sum(sizes[:rest])

    def index_batches(self) -> Iterator[np.ndarray]:
        """Yields the example indices of each global batch, forever, reshuffled in each epoch.

        Every process gets the same indices.
        """
        generator = np.random.default_rng(0)
        while True:
            order = generator.permutation(len(self.data.train_images))
            for where in self.epoch_slices:
                yield order[where]


def open_job(
    models: Sequence[str],
    *,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    check: Callable[[argparse.Namespace], str | None] | None = None,
    shards_flag: str = "num_devices",
) -> BenchmarkJob:
    """Reserves standard output for the answers, parses the flags and loads the data.

    Called before a framework is imported, which takes seconds and may print: wrong flags end the
    program with code 2 and unusable data with code 3, each after one line on standard error.

    Args:
        models: names of the models that the program can train.
        flags: the program's own flags: name → arguments of `add_argument`.
        check: returns the error in a combination of flags, or None.
        shards_flag: the flag with the number of equal parts of a global batch.
    """
    claim_stdout()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", choices=models, default=models[0])
    parser.add_argument("--global_batch_size", type=int, default=256)
    parser.add_argument("--num_devices", type=int, default=2)
    parser.add_argument("--data_dir", type=pathlib.Path, required=True)
    for name, arguments in (flags or {}).items():
        parser.add_argument(f"--{name}", **arguments)
    values = parser.parse_args()
    for name in {"num_devices", shards_flag}:
        if getattr(values, name) < 1:
            parser.error(f"--{name}={getattr(values, name)} must be at least 1")
    num_shards = getattr(values, shards_flag)
    if values.global_batch_size < 1 or values.global_batch_size % num_shards:
        parser.error(
            f"--global_batch_size={values.global_batch_size} must be a multiple of"
            f" --{shards_flag}={num_shards}, for equal shards"
        )
    if check and (error := check(values)):
        parser.error(error)
    job = BenchmarkJob(
        values.model, values.global_batch_size, values.num_devices,
        load_fashion_mnist(values.data_dir), num_shards,
        {name: getattr(values, name) for name in flags or {}},
    )  # fmt: skip
    if not job.epoch_slices:
        parser.error(
            f"--global_batch_size={values.global_batch_size}: more than the"
            f" {len(job.data.train_images)} training images; use less"
        )
    return job


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def end_with_parent(parent_pid: int) -> None:
    """Makes Linux end this process when its parent ends, even if the parent is killed.

    On other systems, the end of standard input and broken connections do so, slightly later.

    Args:
        parent_pid: process id of the parent, which may have ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            sys.exit("error: the process that started this one is gone")


def check_num_parameters(job: BenchmarkJob, num_parameters: int) -> None:
    """Raises an error unless the network has the parameters that all programs train."""
    if num_parameters != NUM_PARAMETERS[job.model]:
        raise AssertionError(
            f"{job.model} with {num_parameters} trainable parameters —"
            f" {NUM_PARAMETERS[job.model]} are required"
        )


def describe(job: BenchmarkJob, settings: str, **versions: str) -> dict:
    """Returns a program's description of itself.

    Args:
        job: the training.
        settings: settings chosen for speed, in a few words.
        **versions: versions of its framework, besides Python and NumPy.
    """
    return {
        "versions": {"python": platform.python_version(), "numpy": np.__version__, **versions},
        "num_parameters": NUM_PARAMETERS[job.model],
        "settings": settings,
        "steps_per_epoch": len(job.epoch_slices),
        "images_per_epoch": job.num_images(len(job.epoch_slices)),
    }


def training_handlers(
    train_steps: Callable[[int], tuple[int, float]],
    evaluate: Callable[[], float],
    *,
    prepare: Callable[[int], None] | None = None,
) -> dict[str, Callable[..., dict]]:
    """Returns handlers that execute requests and time them.

    Args:
        train_steps: runs a number of optimizer steps and waits for the last; returns the number of
            images and the mean of their losses.
        evaluate: returns the test accuracy.
        prepare: prepares for a number of steps per request; not timed.
    """

    def steps(num_steps: int) -> dict:
        if num_steps < 1:
            raise ValueError(f"num_steps={num_steps} must be at least 1")
        if prepare:
            prepare(num_steps)
        start = time.perf_counter()
        images, loss = train_steps(num_steps)
        return {"sec": time.perf_counter() - start, "images": images, "loss": loss}

    def test() -> dict:
        start = time.perf_counter()
        accuracy = evaluate()
        return {"accuracy": accuracy, "sec": time.perf_counter() - start}

    return {"steps": steps, "evaluate": test}


@functools.cache
def claim_stdout() -> TextIO:
    """Reserves standard output for the answers; other output goes to standard error.

    Returns:
        The stream for the answers, the same one each time.
    """
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def serve(
    about: Mapping,
    handlers: Mapping[str, Callable[..., dict]],
    *,
    requests: Iterable[str] = sys.stdin,
) -> None:
    """Reports that the program is ready, then answers requests until they end.

    Args:
        about: entries of the first line besides `"ready": true`.
        handlers: name of a request → function of the request's other entries that returns the
            answer.
        requests: one line of JSON per request. An invalid one is answered with `{"error": ...}`.
    """
    answers = claim_stdout()
    print(json.dumps({"ready": True, **about}), file=answers, flush=True)
    for line in requests:
        if line.strip():
            print(json.dumps(_answer(line, handlers)), file=answers, flush=True)


def _answer(line: str, handlers: Mapping[str, Callable[..., dict]]) -> dict:
    try:
        request = json.loads(line)
        handler = handlers[request.pop("do")]
        inspect.signature(handler).bind(**request)
    except (ValueError, TypeError, AttributeError, KeyError):
        return {"error": f'{line.strip()} must be {{"do": one of {", ".join(handlers)}}}'}
    return handler(**request)
