"""Disturbs small trainings of each strategy at random moments and resumes them.

Each cycle starts the same command again and disturbs it: a signal, a kill or an error at a file
operation, a damaged checkpoint, a limit of memory. Exit code, last line, checkpoints and processes
are checked each time; a finished training has the weights of an undisturbed one.
"""

import contextlib
import os
import pathlib
import random
import signal
import time

from . import CampaignError, check, harness
from .harness import MAIN, Program, checkpoints

DEVICES = {
    "single": (), "manual": ("--num_devices=2",), "mirrored": ("--num_devices=2",),
    "sharded": ("--num_devices=2",), "multi_worker": ("--num_workers=2",),
}  # fmt: skip
SIGNALS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
STALL_SEC = 20
WATCHED = f"--stall_timeout_sec={STALL_SEC}"
DRIVER = str(pathlib.Path(__file__).with_name("driver.py"))


class Site:
    """The run directories of one strategy, and its training there."""

    def __init__(self, folder: pathlib.Path, strategy: str, choices: random.Random):
        self.words = [f"--strategy={strategy}", *DEVICES[strategy], *harness.TRAIN]
        self.random, self.strategy, self._folder, self.laps = choices, strategy, folder, 0
        self.temporary = folder / "temporary"
        self.temporary.mkdir(parents=True)
        start = time.monotonic()
        self.weights = self.finish()
        self.duration_sec, self.laps = time.monotonic() - start, 1

    @property
    def run_dir(self) -> pathlib.Path:
        return self._folder / f"run {self.laps}"

    def start(self, *words: str, prefix=MAIN) -> Program:
        command = [*prefix, *self.words, f"--out={self.run_dir}", *words]
        return Program(command, self._folder / "output.txt", {"TMPDIR": str(self.temporary)})

    def start_until_some_moment(self, *words: str) -> Program:
        program = self.start(*words)
        end = time.monotonic() + self.random.uniform(0, 1.1) * self.duration_sec
        while time.monotonic() < end and program.is_running():
            time.sleep(0.01)
        return program

    def finish(self) -> str:
        """Trains undisturbed to the end; returns the hash of the weights."""
        program = self.start()
        check(program.wait() == 0, f"{self.strategy}, undisturbed:\n{program.text()}")
        return harness.finished_weights(self.run_dir)


# Each disturbs a training; returns it, what was done, and the expected exit codes.


def _signals(site, *numbers):
    program = site.start_until_some_moment()
    for number in numbers:
        if program.is_running():
            program.process.send_signal(number)
        time.sleep(site.random.choice((0, 0.01, 0.3)) * site.random.random())
    # A signal before the command has started ends the process itself.
    expected = {0, *(SIGNALS[n] for n in numbers), *(-n for n in numbers)}
    return program, " and ".join(n.name for n in numbers), expected


def _two_signals(site):
    return _signals(site, *site.random.choices((signal.SIGTERM, signal.SIGINT), k=2))


def _failing_disk(site, actions, *expected):
    call = site.random.choice(("fsync", "replace", "unlink", "mkdir"))
    fault = f"{call}:{site.random.randint(1, 12)}:{site.random.choice(actions)}"
    return site.start(prefix=[MAIN[0], DRIVER, fault]), fault, {0, *expected}


def _damaged(site):
    """Truncates the newest checkpoint, if there is an earlier one."""
    found, told = checkpoints(site.run_dir), "nothing to damage"
    if len(found) > 1:
        os.truncate(found[-1], found[-1].stat().st_size // 2)
        told = f"damaged {found[-1].name}"
    return site.start(), told, {0}


def _suspended(site):
    """Suspends the training, for longer than its stall time-out, too."""
    program = site.start_until_some_moment(WATCHED)
    sec = site.random.choice((0.5, 2, 1.2 * STALL_SEC))
    for number in (signal.SIGSTOP, signal.SIGCONT):
        if program.is_running():
            os.killpg(program.process.pid, number)
        time.sleep(sec if number == signal.SIGSTOP else 0)
    return program, f"SIGSTOP for {sec:g} s", {0}


def _memory_limit(site):
    mib = site.random.randint(1500, 6000)
    prefix = ["prlimit", f"--as={mib << 20}", *MAIN]
    # Without address space, native code may also abort, use a null pointer, or exit by itself.
    expected = {0, 6, 138, 142, 127, -9, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGALRM}
    return site.start(WATCHED, prefix=prefix), f"{mib} MiB of address space", expected


def _killed_worker(site):
    """Kills a process that the training has started; the starter of workers restarts them."""
    program = site.start_until_some_moment()
    others = [pid for pid in program.processes() if pid != program.process.pid]
    if others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(site.random.choice(others), signal.SIGKILL)
    return program, f"killed one of {len(others)} processes", {0, 138}


KINDS = {
    "SIGKILL": (_signals, signal.SIGKILL),
    "SIGTERM": (_signals, signal.SIGTERM),
    "SIGINT": (_signals, signal.SIGINT),
    "second signal": (_two_signals,),
    "damaged checkpoint": (_damaged,),
    "worker killed": (_killed_worker,),
    "kill at a file operation": (_failing_disk, ["kill"], -9),
    "disk full": (_failing_disk, ["ENOSPC"], 8),
    "read-only": (_failing_disk, ["EROFS", "EIO"], 5, 8),
    "slow disk": (_failing_disk, ["slow"]),
    "SIGSTOP": (_suspended,),
    "memory limit": (_memory_limit,),
}
OF_WORKERS = list(KINDS)[:6]


def cycle(site: Site, kind: str) -> str:
    """Starts a training, disturbs it, and checks what it leaves; returns what was done."""
    before = checkpoints(site.run_dir)
    disturb, *arguments = KINDS[kind]
    program, told, expected = disturb(site, *arguments)
    try:
        code = program.wait()
        told = f"{site.strategy}: {told}, exit code {code}"
        check(code in expected, f"exit code {code}, not one of {expected}")
        if code >= 0 and code != 127 and kind != "worker killed":  # The other worker has a line.
            harness.check_output(program, code)
        program.check_no_process_is_left()
        now = checkpoints(site.run_dir)
        is_kept = not before or (now and now[-1].name >= before[-1].name)
        check(is_kept or kind == "damaged checkpoint", f"{before[-1:]} is lost")
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


def run(folder, options, counts):
    """Runs cycles; yields what each one did. `only` names strategies or kinds of faults."""
    choices, sites = random.Random(options.seed), {}
    strategies = [s for s in DEVICES if s.replace("_", " ") in options.only] or list(DEVICES)
    kinds = [kind for kind in KINDS if kind in options.only] or list(KINDS)
    for number in range(1, options.cycles + 1):
        name = choices.choice(strategies)
        if name not in sites:
            sites[name] = Site(folder / name, name, random.Random(f"{options.seed} {name}"))
        allowed = [kind for kind in kinds if kind in OF_WORKERS or name != "multi_worker"]
        told = cycle(sites[name], choices.choice(allowed or ["SIGKILL"]))
        counts["cycles"] += 1
        counts["finished with the weights of an undisturbed run"] += told.endswith("finished")
        yield f"cycle {number}: {told}"
    for name, site in sites.items():
        check(site.finish() == site.weights, f"{name}: other weights")
