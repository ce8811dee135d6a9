"""Disturbs small trainings of each strategy at random moments and resumes them.

Each cycle starts the same command again and disturbs it: a signal, a kill or an error at a file
operation, a damaged checkpoint, a limit of memory. Exit code, last line, checkpoints and processes
are checked each time; a finished training has the weights of an undisturbed one.
"""

import collections
import contextlib
import os
import pathlib
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from . import CampaignError, Options, check, harness
from .harness import MAIN, Program, checkpoints

STRATEGIES = ("single", "manual", "mirrored", "sharded", "multi_worker")
SIGNALS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
STALL_SEC = 20
WATCHED = f"--stall_timeout_sec={STALL_SEC}"
DRIVER = str(pathlib.Path(__file__).with_name("driver.py"))


class Site:
    """The run directories of one strategy, and its training there.

    Args:
        folder: folder for all its files.
        strategy: name of the strategy.
        choices: source of all random choices.
    """

    def __init__(self, folder: pathlib.Path, strategy: str, choices: random.Random):
        count = {"single": [], "multi_worker": ["--num_workers=2"]}
        devices = count.get(strategy, ["--num_devices=2"])
        self.words = [f"--strategy={strategy}", *devices, *harness.TRAIN]
        self.random, self.strategy, self._folder, self.laps = choices, strategy, folder, 0
        self.temporary = folder / "temporary"
        self.temporary.mkdir(parents=True)
        self._environment = {"TMPDIR": str(self.temporary)}
        start = time.monotonic()
        self.weights = self.finish()
        self.duration_sec, self.laps = time.monotonic() - start, 1

    @property
    def run_dir(self) -> pathlib.Path:
        """The current run directory."""
        return self._folder / f"run {self.laps}"

    def start(self, *words: str, prefix: Sequence[str] = MAIN) -> Program:
        """Starts the training in the run directory."""
        command = [*prefix, *self.words, f"--out={self.run_dir}", *words]
        return Program(command, self._folder / "output.txt", self._environment)

    def finish(self) -> str:
        """Trains undisturbed to the end; returns the hash of the weights."""
        program = self.start()
        check(program.wait() == 0, f"{self.strategy}, undisturbed:\n{program.text()}")
        return harness.finished_weights(self.run_dir)

    def wait_for_moment(self, program: Program) -> None:
        """Waits until a random moment of the training, or its end."""
        end = time.monotonic() + self.random.uniform(0, 1.1) * self.duration_sec
        while time.monotonic() < end and program.process.poll() is None:
            time.sleep(0.01)


Ended = tuple[Program, str, tuple[int, ...]]  # What was done, and the expected exit codes.


def _send(site: Site, *numbers: signal.Signals) -> Ended:
    program = site.start()
    site.wait_for_moment(program)
    for number in numbers:
        if program.process.poll() is None:
            program.process.send_signal(number)
        time.sleep(site.random.choice((0, 0.01, 0.3)) * site.random.random())
    # A signal before the command has started ends the process itself.
    expected = {0, *(SIGNALS[n] for n in numbers), *(-n for n in numbers)}
    return program, " and ".join(n.name for n in numbers), tuple(expected)


def _failing_disk(site: Site, actions: Sequence[str], expected: tuple[int, ...]) -> Ended:
    call = site.random.choice(("fsync", "replace", "unlink", "mkdir"))
    fault = f"{call}:{site.random.randint(1, 12)}:{site.random.choice(actions)}"
    return site.start(prefix=[MAIN[0], DRIVER, fault]), fault, (0, *expected)


def _damaged(site: Site) -> Ended:
    """Truncates the newest checkpoint, if there is an earlier one."""
    found, told = checkpoints(site.run_dir), "nothing to damage"
    if len(found) > 1:
        os.truncate(found[-1], found[-1].stat().st_size // 2)
        told = f"damaged {found[-1].name}"
    return site.start(), told, (0,)


def _suspended(site: Site) -> Ended:
    """Suspends the training, for longer than its stall time-out, too."""
    program = site.start(WATCHED)
    site.wait_for_moment(program)
    sec = site.random.choice((0.5, 2, 1.2 * STALL_SEC))
    for number in (signal.SIGSTOP, signal.SIGCONT):
        if program.process.poll() is None:
            os.killpg(program.process.pid, number)
        time.sleep(sec if number == signal.SIGSTOP else 0)
    return program, f"SIGSTOP for {sec:g} s", (0,)


def _memory_limit(site: Site) -> Ended:
    mib = site.random.randint(1500, 6000)
    prefix = ["prlimit", f"--as={mib << 20}", *MAIN]
    # Without address space, native code may also abort, use a null pointer, or exit by itself.
    expected = (0, 6, 138, 142, 127, -9, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGALRM)
    return site.start(WATCHED, prefix=prefix), f"{mib} MiB of address space", expected


def _killed_worker(site: Site) -> Ended:
    """Kills a process that the training has started; the starter of workers restarts them."""
    program = site.start()
    site.wait_for_moment(program)
    others = [pid for pid in program.processes() if pid != program.process.pid]
    if others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(site.random.choice(others), signal.SIGKILL)
    return program, f"killed one of {len(others)} processes", (0, 138)


KINDS: dict[str, Callable[[Site], Ended]] = {
    "SIGKILL": lambda site: _send(site, signal.SIGKILL),
    "SIGTERM": lambda site: _send(site, signal.SIGTERM),
    "SIGINT": lambda site: _send(site, signal.SIGINT),
    "second signal": lambda site: _send(
        site, *site.random.choices((signal.SIGTERM, signal.SIGINT), k=2)
    ),
    "kill at a file operation": lambda site: _failing_disk(site, ["kill"], (-9,)),
    "disk full": lambda site: _failing_disk(site, ["ENOSPC"], (8,)),
    "read-only": lambda site: _failing_disk(site, ["EROFS", "EIO"], (5, 8)),
    "slow disk": lambda site: _failing_disk(site, ["slow"], ()),
    "damaged checkpoint": _damaged,
    "SIGSTOP": _suspended,
    "memory limit": _memory_limit,
    "worker killed": _killed_worker,
}
OF_WORKERS = (
    "SIGKILL",
    "SIGTERM",
    "SIGINT",
    "second signal",
    "damaged checkpoint",
    "worker killed",
)


def cycle(site: Site, kind: str) -> str:
    """Starts a training, disturbs it, and checks what it leaves; returns what was done."""
    before = checkpoints(site.run_dir)
    program, told, expected = KINDS[kind](site)
    try:
        code = program.wait()
        told = f"{site.strategy}: {told}, exit code {code}"
        check(code in expected, f"exit code {code}, not one of {expected}")
        if code >= 0 and code != 127 and kind != "worker killed":  # The other worker has a line.
            harness.check_output(program, code)
        program.check_no_process_is_left()
        now = checkpoints(site.run_dir)
        if kind != "damaged checkpoint":
            is_kept = not before or (now and now[-1].name >= before[-1].name)
            check(is_kept, f"{before[-1:]} is lost")
        for path in now:
            harness.check_intact(path)
        if code == 0:
            check(harness.finished_weights(site.run_dir) == site.weights, "other weights")
            left = [path.name for path in site.temporary.iterdir()]
            check(not left, f"left in TMPDIR: {left}")
            site.laps += 1
            told += ", finished"
    except CampaignError as error:
        raise CampaignError(f"{told}: {error}\n{program.text()}") from error
    finally:
        program.kill_all()
    return told


def run(folder: pathlib.Path, options: Options, counts: collections.Counter) -> Iterator[str]:
    """Runs cycles; yields what each one did. `only` names strategies or kinds of faults."""
    choices, sites = random.Random(options.seed), {}
    strategies = [s for s in STRATEGIES if s.replace("_", " ") in options.only] or STRATEGIES
    kinds = [kind for kind in KINDS if kind in options.only] or list(KINDS)
    for number in range(1, options.cycles + 1):
        name = choices.choice(strategies)
        if name not in sites:
            of_site = random.Random(f"{options.seed} {name}")
            sites[name] = Site(folder / name, name, of_site)
        allowed = [kind for kind in kinds if kind in OF_WORKERS or name != "multi_worker"]
        told = cycle(sites[name], choices.choice(allowed or ["SIGKILL"]))
        counts["cycles"] += 1
        counts["finished with the weights of an undisturbed run"] += told.endswith("finished")
        yield f"cycle {number}: {told}"
    for name, site in sites.items():
        check(site.finish() == site.weights, f"{name}: other weights")
        counts["finished with the weights of an undisturbed run"] += 1
