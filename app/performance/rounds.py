"""Measures processes in turn (A B A B …), so that disturbances affect all of them."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from app.devices.local_workers import WorkerGroup, split_resources
from app.performance.case import Block, Case, Facts, Sample
from app.performance.case_process import sample
from app.runtime.processes import ChildProcess
from app.runtime.progress_bar import Progress


def measure(cases: Sequence[Case], *, repeats: int, progress: Progress) -> list[Sample]:
    """Measures cases in `repeats` rounds, one block per case in every round.

    Each case has a separate process, which sleeps while others are timed. The order of the cases is
    reversed in every other round, so that no case always follows the same one.

    Args:
        cases: what to measure.
        repeats: number of rounds.
        progress: shows the progress.

    Returns:
        One sample per case.

    Raises:
        LockstepError: a case cannot be trained; nothing was measured.
        DeviceError: a process was killed, as the kernel does when memory runs out.
    """
    with contextlib.ExitStack() as stack:
        samplers: list[_Sampler] = []
        for number, case in enumerate(cases, start=1):
            progress.start(f"preparing {number} of {len(cases)}: {case.name}")
            samplers.append(_Sampler(stack, progress, case))
        progress.start("measuring", repeats * len(cases))
        done = 0
        for round_number in range(repeats):
            for sampler in samplers if round_number % 2 == 0 else reversed(samplers):
                sampler.measure()
                done += 1
                progress.message(("step", done))
        return [sampler.finish() for sampler in samplers]


class _Sampler:
    """The parent's side of a process that times blocks; the constructor waits until it is ready."""

    def __init__(self, stack: contextlib.ExitStack, progress: Progress, case: Case):
        self._case, self._progress = case, progress
        self._process = _create_process(case)
        stack.enter_context(self._process)
        self._blocks: list[Block] = []
        self._facts: Facts = self._message("facts")
        self._num_steps: int = self._message("ready")

    def _message(self, kind: str) -> Any:
        """Returns the next message of a kind; shows earlier ones to the user."""
        while True:
            _, message = self._process.receive()
            if message[0] == kind:
                return message[1]
            self._progress.message(message)

    def measure(self) -> None:
        """Times a block of steps."""
        self._process.send(self._num_steps)
        self._blocks.append(self._message("block"))

    def finish(self) -> Sample:
        """Ends the processes; returns what they measured."""
        self._process.send(None)
        result = self._process.receive()[1]
        results = result if isinstance(result, list) else [result]  # One for each worker.
        peak = sum(peak_bytes for peak_bytes, _ in results)
        return Sample(self._case, self._facts, self._blocks, peak, results[0][1])


def _create_process(case: Case) -> ChildProcess | WorkerGroup:
    if case.config.has_workers:
        return WorkerGroup(split_resources(case.num_workers, case.config), sample, case)
    cores = sorted(os.sched_getaffinity(0))[: case.cores] if case.cores else ()
    return ChildProcess(sample, case, cores=cores)
