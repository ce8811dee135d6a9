"""Processes that are measured in turn, A B A B …: whatever slows the machine slows all of them."""

import contextlib
import functools
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from app.config import Config
from app.errors import DeviceError
from app.free_memory import available_bytes
from app.processes import OwnProcess
from app.progress import StepProgress
from app.sharing import share_out
from app.speed.exchange_model import ExchangeTime
from app.speed.held_memory import Held
from app.speed.peak import sample_peak
from app.speed.point import Block, Point, Sampled
from app.speed.sampler import sample
from app.worker_group import WorkerGroup

_PEAK_PRODUCTS = 2  # In a block: seconds on a small CPU, a few milliseconds on a GPU.


class Measured(NamedTuple):
    """What was measured in the same rounds.

    Attributes:
        sampled: the points.
        peaks: precision → the machine's limit in each round, in floating-point operations a second.
        exchange_times: of all-reduces by themselves.
    """

    sampled: list[Sampled]
    peaks: dict[str, list[float]]
    exchange_times: list[ExchangeTime]


def measure(
    points: Sequence[Point],
    *,
    repeats: int,
    progress: StepProgress,
    peaks: Sequence[Config] = (),
    exchanges_of: Sequence[Point] = (),
) -> Measured:
    """Measures points in `repeats` rounds, a block of each in every round.

    Each point lives in a process of its own, which sleeps while others are timed. In every other
    round they come in the opposite order, so that none always follows the same one.

    Args:
        points: what to measure.
        repeats: how many rounds.
        progress: shows how far it is.
        peaks: configurations for whose precision the machine's limit is measured in the same
            rounds.
        exchanges_of: points whose all-reduce is timed by itself, after the last round.

    Raises:
        LockstepError: a point cannot be trained; nothing was measured.
        DeviceError: too little memory for so many processes.
    """
    with contextlib.ExitStack() as stack:
        samplers = []
        for number, point in enumerate(points, start=1):
            progress.start(f"preparing {number} of {len(points)}: {point.name}")
            samplers.append(_Sampler(stack, progress, sample, point))
            _check_memory(len(points) - number, max(s.held_bytes for s in samplers))
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
        exchange_times = []
        for point, sampler in zip(points, samplers, strict=True):
            if point in exchanges_of:
                progress.start(f"timing the all-reduce of {point.name}")
                exchange_times += sampler.time_exchange()
        sampled = [
            Sampled(point, sampler.facts, sampler.blocks, sampler.finish())
            for point, sampler in zip(points, samplers, strict=True)
        ]
        rates = {}
        for precision, sampler in limits.items():
            flops = sampler.finish()
            rates[precision] = [flops / block.step_sec for block in sampler.blocks]
        return Measured(sampled, rates, exchange_times)


class _Sampler:
    """Our end of a process that times blocks; it is ready when this is made."""

    def __init__(self, stack, progress, function: Callable, argument):
        self._process = stack.enter_context(_create_process(function, argument))
        self._progress = progress
        self.facts = None
        self.blocks: list[Block] = []
        while (message := self._message())[0] != "ready":
            if message[0] == "facts":
                self.facts = message[1]
        self.num_steps = message[1]

    def _message(self) -> tuple:
        """Returns the next message that is not for the person who waits."""
        while True:
            _, message = self._process.receive()
            if message[0] in ("facts", "ready", "block", "exchange"):
                return message
            self._progress.message(message)

    @property
    def held_bytes(self) -> int:
        """The most memory that the process has held so far."""
        status = pathlib.Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        return int(peak) * 1024

    def measure(self) -> None:
        self._process.send(self.num_steps)
        self.blocks.append(self._message()[1])

    def time_exchange(self) -> list[ExchangeTime]:
        self._process.send("exchange")
        return self._message()[1]

    def finish(self):
        """Returns what the function returned, over all processes; they end."""
        self._process.send(None)
        result = self._process.receive()[1]
        return functools.reduce(Held.plus, result) if isinstance(result, list) else result


def _create_process(function: Callable, argument) -> OwnProcess | WorkerGroup:
    if isinstance(argument, Point) and argument.config.strategy == "multi_worker":
        return WorkerGroup(share_out(argument.config, num_cores=argument.cores), function, argument)
    return OwnProcess(function, argument)


def _check_memory(num_missing: int, largest_bytes: int) -> None:
    """Refuses to go on where the next process would not fit beside those that are there.

    It is taken to need as much as the largest of them, and half of that again to work with.
    """
    available, needed = available_bytes(), 3 * largest_bytes // 2
    if num_missing and available is not None and available < needed:
        missing = "1 more process" if num_missing == 1 else f"{num_missing} more processes"
        raise DeviceError(
            f"{available / 2**20:,.0f} MiB of memory are left for {missing} —"
            f" {needed / 2**20:,.0f} MiB are required for each; measure fewer points at once"
        )
