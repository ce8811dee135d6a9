"""Measures processes in turn (A B A B …), so that disturbances affect all of them."""

import contextlib
import functools
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from app.config import TrainConfig
from app.devices.free_memory import available_bytes
from app.devices.local_workers import split_resources
from app.devices.worker_group import WorkerGroup
from app.performance.all_reduce_model import AllReduceTime
from app.performance.case import Block, Case, Facts, Sample
from app.performance.case_process import BLOCK_SEC, sample
from app.performance.matmul_peak import sample_peak
from app.performance.peak_memory import PeakMemory
from app.runtime.errors import DeviceError
from app.runtime.processes import ChildProcess
from app.runtime.progress_bar import StepProgress

_PEAK_PRODUCTS = 2  # Per block: seconds on a small CPU, milliseconds on a GPU.


class Measured(NamedTuple):
    """The results of the same rounds.

    Attributes:
        samples: one sample per case.
        peaks: precision → the machine's peak speed in each round, in floating-point operations per
            second.
        all_reduce_times: times of all-reduces without other work.
    """

    samples: list[Sample]
    peaks: dict[str, list[float]]
    all_reduce_times: list[AllReduceTime]


def measure(
    cases: Sequence[Case],
    *,
    repeats: int,
    progress: StepProgress,
    peaks: Sequence[TrainConfig] = (),
    all_reduces_of: Sequence[Case] = (),
    block_sec: float = BLOCK_SEC,
) -> Measured:
    """Measures cases in `repeats` rounds, one block per case in every round.

    Each case has a separate process, which sleeps while others are timed. The order of the cases is
    reversed in every other round, so that no case always follows the same one.

    Args:
        cases: what to measure.
        repeats: number of rounds.
        progress: shows the progress.
        peaks: configurations for whose precision the peak speed is measured in the same rounds.
        all_reduces_of: cases whose all-reduce is timed separately, after the last round.
        block_sec: approximate duration of a block. Shorter blocks make shorter rounds, in which
            other work on the machine is more likely to slow down all cases equally.

    Raises:
        LockstepError: a case cannot be trained; nothing was measured.
        DeviceError: there is too little memory for the processes.
    """
    with contextlib.ExitStack() as stack:
        samplers = []
        for number, case in enumerate(cases, start=1):
            progress.start(f"preparing {number} of {len(cases)}: {case.name}")
            samplers.append(_Sampler(stack, progress, sample, case))
            samplers[-1].num_steps = max(1, round(samplers[-1].num_steps * block_sec / BLOCK_SEC))
            _check_memory(len(cases) - number, max(s.peak_bytes for s in samplers))
        limits = {
            config.precision: _Sampler(stack, progress, sample_peak, config) for config in peaks
        }
        for sampler in limits.values():
            sampler.num_steps = _PEAK_PRODUCTS
        everyone = [*samplers, *limits.values()]
        progress.start("measuring", repeats * len(everyone))
        done = 0
        for round_number in range(repeats):
            for sampler in everyone if round_number % 2 == 0 else reversed(everyone):
                sampler.measure()
                done += 1
                progress.message(("step", done))
        all_reduce_times = []
        for case, sampler in zip(cases, samplers, strict=True):
            if case in all_reduces_of:
                progress.start(f"timing the all-reduce of {case.name}")
                all_reduce_times += sampler.time_all_reduce()
        samples = [
            Sample(case, sampler.facts, sampler.blocks, sampler.finish())
            for case, sampler in zip(cases, samplers, strict=True)
        ]
        rates = {}
        for precision, sampler in limits.items():
            flops = sampler.finish()
            rates[precision] = [flops / block.step_sec for block in sampler.blocks]
        return Measured(samples, rates, all_reduce_times)


class _Sampler:
    """The parent's side of a process that times blocks; the constructor waits until it is ready."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        progress: StepProgress,
        function: Callable[..., Any],
        argument: Case | TrainConfig,
    ):
        self._process = _create_process(function, argument)
        stack.enter_context(self._process)
        self._progress = progress
        self._facts: Facts | None = None
        self.blocks: list[Block] = []
        while (message := self._message())[0] != "ready":
            if message[0] == "facts":
                self._facts = message[1]
        self.num_steps = message[1]

    @property
    def facts(self) -> Facts:
        """The facts about a training, as its process reports them."""
        if self._facts is None:
            raise RuntimeError("this process measures no training")
        return self._facts

    def _message(self) -> tuple[str, Any]:
        """Returns the next message that is not for the user."""
        while True:
            _, message = self._process.receive()
            if message[0] in ("facts", "ready", "block", "all_reduce"):
                return message
            self._progress.message(message)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the process so far."""
        status = pathlib.Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        return int(peak) * 1024

    def measure(self) -> None:
        self._process.send(self.num_steps)
        self.blocks.append(self._message()[1])

    def time_all_reduce(self) -> list[AllReduceTime]:
        self._process.send("all_reduce")
        return self._message()[1]

    def finish(self) -> Any:
        """Ends the processes; returns the function's result over all of them."""
        self._process.send(None)
        result = self._process.receive()[1]
        return functools.reduce(PeakMemory.plus, result) if isinstance(result, list) else result


def _create_process(
    function: Callable[..., Any], argument: Case | TrainConfig
) -> ChildProcess | WorkerGroup:
    if isinstance(argument, Case) and argument.config.has_workers:
        resources = split_resources(argument.num_workers, argument.config, num_cores=argument.cores)
        return WorkerGroup(resources, function, argument)
    return ChildProcess(function, argument)


def _check_memory(num_missing: int, largest_bytes: int) -> None:
    """Raises an error if the next process would not fit into the memory.

    Assumes that it needs as much as the largest existing process, and half as much again to work
    with.
    """
    available, needed = available_bytes(), 3 * largest_bytes // 2
    if num_missing and available is not None and available < needed:
        missing = "1 more process" if num_missing == 1 else f"{num_missing} more processes"
        raise DeviceError(
            f"{available / 2**20:,.0f} MiB of memory are free for {missing}, but each needs"
            f" {needed / 2**20:,.0f} MiB; measure fewer cases at once"
        )
