"""Defines the failures of `make soak`: each starts a training, disturbs it and waits."""

import contextlib
import os
import pathlib
import random
import re
import resource
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from app.records.checkpoint import checkpoint_paths
from app.runtime.fault_points import POINTS, VARIABLE
from forked_program import Program
from soak_places import MemoryGroup, SmallDisk

TIMEOUT_SEC = 300
_KILLED, _NO_SPACE, _REFUSED, _NO_MEMORY = -signal.SIGKILL, 8, 5, 6
STALLED = 138
NO_THREAD_DATA = 127  # "cannot allocate memory for thread-local data".
# Exit codes for a signal; the last one before the command has started.
_CODES = {
    signal.SIGKILL: (_KILLED,),
    signal.SIGTERM: (143, -signal.SIGTERM),
    signal.SIGINT: (130, -signal.SIGINT),
}
_WRITE_POINTS = [point for point in POINTS if "." in point or point == "log"]
_STALL_SEC = 20
_CLOCK_JUMP_SEC = 3600.0
_STARTUP_SHARE, _VERIFIED_SHARE = 0.3, 0.3


class SoakError(Exception):
    """A check that failed."""


class Site:
    """The directories of one strategy, and how to start its training there.

    Args:
        folder: folder for all its files.
        words: command line of the training, without `--out`.
        data_dir: folder of the images.
        choices: source of all random choices.
        process_share: share of trainings that start a new process instead of a fork.
        has_mounts: whether the run directory is on its own `disk`.

    Attributes:
        disk: file system of the run directories; None without mounts.
        run_dir: current run directory.
        temporary: directory for temporary files.
        startup_sec: time of an undisturbed training until its first step.
        steps_sec: time from there to its end.
        truncated: checkpoint that was truncated last.
        recovery_sec: times from the start to the first new step, without those of new processes.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        words: list[str],
        data_dir: pathlib.Path,
        choices: random.Random,
        *,
        process_share: float,
        has_mounts: bool,
    ):
        self.random, self._words, self._data_dir = choices, words, data_dir
        self._process_share, self._folder = process_share, folder
        self.temporary, self._runs = folder / "temporary", folder / "runs"
        for path in (folder, self.temporary, self._runs):
            path.mkdir()
        self.disk = SmallDisk(self._runs) if has_mounts else None
        self.laps, self.startup_sec, self.steps_sec = 0, 0.0, 0.0
        self.truncated: pathlib.Path | None = None
        self.recovery_sec: list[float] = []
        self.run_dir = self._runs / "undisturbed"

    def start(
        self,
        *words: str,
        fault: str = "",
        prepare: Callable[[], object] = lambda: None,
        is_fork: bool = False,
        name: str = "output.txt",
    ) -> Program:
        """Starts the training in the run directory.

        Args:
            *words: further options.
            fault: value of `LOCKSTEP_FAULT`.
            prepare: called in the new process.
            is_fork: whether it must be a fork.
            name: name of the file for its output.
        """
        # Verified steps change no weights, and double the time to compile.
        verify = [] if self.random.random() < _VERIFIED_SHARE else ["--verify_every=0"]
        return Program(
            [*self._words, f"--out={self.run_dir}", *verify, *words],
            self._folder / name,
            {
                "FASHION_MNIST_DIR": str(self._data_dir),
                "TMPDIR": str(self.temporary),
                VARIABLE: fault,
            },
            prepare=prepare,
            is_fork=is_fork or self.random.random() >= self._process_share,
        )

    def next_run(self) -> None:
        """Starts the next training in a new directory."""
        self.laps, self.truncated = self.laps + 1, None
        self.run_dir = self._runs / f"run {self.laps}"

    def wait_for_moment(self, program: Program) -> str:
        """Waits until a random moment of the start-up or of the training, and returns it."""
        if not program.is_fork or self.random.random() < _STARTUP_SHARE:
            delay_sec = self.random.uniform(0, self.startup_sec)
            told = f"{delay_sec:.2f} s"
        else:
            program.wait_for_first_step(TIMEOUT_SEC)
            delay_sec = self.random.uniform(0, self.steps_sec)
            told = f"{delay_sec:.2f} s of steps"
        program.wait(delay_sec)
        return told

    def finish(self, program: Program) -> int:
        """Waits for the end of a program; returns the exit code."""
        code = program.wait(TIMEOUT_SEC)
        if code is None:
            program.signal(signal.SIGKILL)
            program.wait(TIMEOUT_SEC)
            raise SoakError(f"it has not ended after {TIMEOUT_SEC} s")
        sec = program.read_first_step_sec()
        if sec is not None:
            self.recovery_sec.append(sec)
        return code


class Ended(NamedTuple):
    """How a training ended: what was done, its exit code, and the exit codes that are right."""

    told: str
    code: int
    expected: tuple[int, ...]


def _send(number: signal.Signals, site: Site, **options) -> Ended:
    program = site.start(**options)
    moment = site.wait_for_moment(program)
    program.signal(number)
    code = site.finish(program)
    return Ended(f"{number.name} after {moment}", code, (0, *_CODES[number]))


def _sigkill(site: Site) -> Ended:
    return _send(signal.SIGKILL, site)


def _sigterm(site: Site) -> Ended:
    return _send(signal.SIGTERM, site)


def _sigint(site: Site) -> Ended:
    return _send(signal.SIGINT, site)


def _two_signals(site: Site) -> Ended:
    """Sends a second signal, at which the program leaves at once."""
    program = site.start()
    moment = site.wait_for_moment(program)
    numbers = [site.random.choice((signal.SIGTERM, signal.SIGINT)) for _ in range(2)]
    delay_sec = site.random.choice((0, 0.01, 0.3)) * site.random.random()
    program.signal(numbers[0])
    program.wait(delay_sec)
    program.signal(numbers[1])
    code = site.finish(program)
    told = f"{numbers[0].name}, {numbers[1].name} {1000 * delay_sec:.0f} ms later, after {moment}"
    return Ended(told, code, (0, *_CODES[numbers[0]], *_CODES[numbers[1]]))


def _at_point(site: Site, points: list[str], action: str, expected: int) -> Ended:
    fault = f"{site.random.choice(points)}:{site.random.randint(1, 6)}:{action}"
    return Ended(fault, site.finish(site.start(fault=fault)), (0, expected))


def _kill_at(site: Site) -> Ended:
    return _at_point(site, list(POINTS), "kill", _KILLED)


def _disk_full_at(site: Site) -> Ended:
    return _at_point(site, _WRITE_POINTS, "enospc", _NO_SPACE)


def _truncated(site: Site) -> Ended:
    """Truncates the newest checkpoint, if there is an earlier one."""
    intact = checkpoint_paths(site.run_dir)
    told = "nothing to truncate"
    if len(intact) > 1:
        site.truncated = intact[-1]
        path = site.random.choice(sorted(intact[-1].iterdir()))
        os.truncate(path, path.stat().st_size // 2)
        told = f"truncated {path.parent.name}/{path.name}"
    ended = _send(site.random.choice(list(_CODES)), site)
    return ended._replace(told=f"{told}, {ended.told}")


def _suspended(site: Site) -> Ended:
    """Suspends the training several times; it must neither stall nor change."""
    is_long = site.random.random() < 0.15
    words = [f"--stall_timeout_sec={_STALL_SEC}"] if is_long else []
    program = site.start(*words)
    told = []
    for _ in range(1 if is_long else 2):
        site.wait_for_moment(program)
        sec = 1.2 * _STALL_SEC if is_long else site.random.uniform(0.2, 2)
        program.signal(signal.SIGSTOP)
        time.sleep(sec)
        program.signal(signal.SIGCONT)
        told.append(f"{sec:.1f} s")
    return Ended(f"SIGSTOP for {', '.join(told)}", site.finish(program), (0,))


def _slow_disk(site: Site) -> Ended:
    fault = f"{site.random.choice(_WRITE_POINTS)}:1:slow"
    if site.random.random() < 0.3:
        return Ended(fault, site.finish(site.start(fault=fault)), (0,))
    ended = _send(site.random.choice(list(_CODES)), site, fault=fault)
    return ended._replace(told=f"{fault}, {ended.told}")


def _memory_limit(site: Site) -> Ended:
    """Limits the memory in a control group if possible, else the address space."""
    mib = site.random.randint(30, 400)
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(MemoryGroup(f"soak-{os.getpid()}", mib << 20))
        except OSError:
            return _address_space(site)
        code = site.finish(site.start(prepare=group.join))
    return Ended(f"control group of {mib} MiB", code, (0, _NO_MEMORY, _KILLED))


def _address_space(site: Site) -> Ended:
    mib = site.random.randint(30, 2000)

    def limit() -> None:
        status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
        used = 1024 * int(re.search(r"VmSize:\s*(\d+)", status)[1])
        resource.setrlimit(resource.RLIMIT_AS, (used + (mib << 20),) * 2)

    stall = f"--stall_timeout_sec={_STALL_SEC}"
    code = site.finish(site.start(stall, prepare=limit, is_fork=True))
    # Without memory, native code may abort, use a null pointer or wait forever; the C library
    # exits.
    ends = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGALRM, NO_THREAD_DATA)
    codes = (0, _NO_MEMORY, _KILLED, STALLED, *ends)
    return Ended(f"address space of {mib} MiB", code, codes)


def _read_only(site: Site) -> Ended:
    program = site.start()
    moment = site.wait_for_moment(program)
    with site.disk.read_only():
        code = site.finish(program)
    return Ended(f"read-only after {moment}", code, (0, _REFUSED, _NO_SPACE))


def _no_files(site: Site) -> Ended:
    free = site.random.randint(0, 24)
    with site.disk.limited(free_files=free):
        code = site.finish(site.start())
    return Ended(f"{free} files free", code, (0, _NO_SPACE))


def _full_disk(site: Site) -> Ended:
    kib = site.random.randint(0, 8 << 10)
    with site.disk.limited(free_bytes=kib << 10):
        code = site.finish(site.start())
    return Ended(f"{kib} KiB free", code, (0, _NO_SPACE))


def _clock(site: Site) -> Ended:
    """Lets the wall clock jump, and changes the times of all files."""
    for path in site.run_dir.rglob("*"):
        modified = time.time() + site.random.choice((-1, 1)) * _CLOCK_JUMP_SEC
        os.utime(path, (modified, modified))
    jumps = random.Random(site.random.random())
    read_clock = time.time

    def jump() -> None:
        time.time = lambda: read_clock() + jumps.choice((-1, 0, 1)) * _CLOCK_JUMP_SEC

    if site.random.random() < 0.5:
        return Ended("clock", site.finish(site.start(prepare=jump, is_fork=True)), (0,))
    ended = _send(signal.SIGTERM, site, prepare=jump, is_fork=True)
    return ended._replace(told=f"clock, {ended.told}")


def _two_at_once(site: Site) -> Ended:
    """Starts the training twice, with a signal to the first one or without."""
    first = site.start()
    number = site.random.choice((None, *_CODES))
    told = "both at once"
    if number:
        moment = site.wait_for_moment(first)
        told = f"{number.name} after {moment}"
        first.signal(number)
        time.sleep(site.random.choice((0, site.random.uniform(0, 0.3))))
    else:
        time.sleep(site.random.choice((0, site.random.uniform(0, 0.2))))
    second = site.start(name="output 2.txt")
    codes = site.finish(first), site.finish(second)
    told += f": codes {codes[0]} and {codes[1]}"
    outputs = [p.output.read_text(encoding="utf-8") for p in (first, second)]
    for program, code, output in zip((second, first), codes, outputs, strict=True):
        if code == _REFUSED and f"is in use by process {program.pid};" not in output:
            raise SoakError(f"{told}; not the process {program.pid}: {output}")
    if codes[1] == 0:
        first.output.write_text(outputs[1], encoding="utf-8")  # The one to check.
        allowed = (0, _REFUSED, *(_CODES[number] if number else ()))
        return Ended(told, codes[1] if codes[0] in allowed else codes[0], (0,))
    if codes[1] != _REFUSED:
        raise SoakError(f"{told}: {outputs[1]}")
    return Ended(told, codes[0], (0, *(_CODES[number] if number else ())))


FAILURES: dict[str, Callable[[Site], Ended]] = {
    "SIGKILL": _sigkill,
    "SIGTERM": _sigterm,
    "SIGINT": _sigint,
    "second signal": _two_signals,
    "kill at a point": _kill_at,
    "disk full at a point": _disk_full_at,
    "truncated": _truncated,
    "SIGSTOP": _suspended,
    "slow disk": _slow_disk,
    "memory limit": _memory_limit,
    "address space": _address_space,
    "clock jumps": _clock,
    "two at once": _two_at_once,
    "read-only": _read_only,
    "no files": _no_files,
    "full disk": _full_disk,
}
NEED_MOUNTS = ("read-only", "no files", "full disk")
