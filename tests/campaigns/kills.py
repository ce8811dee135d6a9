"""Disturbs small trainings of each strategy at random moments and resumes them.

Each cycle starts the same command again and disturbs it: a signal, a kill or an error at a file
operation, a damaged checkpoint. Exit code, last line, checkpoints and processes are checked each
time; a finished training has the weights of an undisturbed one.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

from app.records.checkpoint import checkpoint_paths
from tests.conftest import ROOT, processes_of, program_environment

from . import CampaignError, check

MAIN = (sys.executable, str(ROOT / "main.py"))
FAILING = (sys.executable, str(ROOT / "tests" / "failing_program.py"), str(ROOT))
TRAIN = (
    *("--device=cpu", "--recipe=d2l", "--deterministic", "--dataset=synthetic", "--epochs=3"),
    *("--num_train_examples=500", "--global_batch_size=50", "--checkpoint_every=3"),
)
DEVICES = {
    "single": (), "manual": ("--num_devices=2",), "mirrored": ("--num_devices=2",),
    "sharded": ("--num_devices=2",), "multi_worker": ("--num_workers=2",),
}  # fmt: skip
END_SEC = 300
SIGNALS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}


class Program:
    """A started command, with a folder for the temporary files of all its processes."""

    def __init__(self, command, output: pathlib.Path, temporary: pathlib.Path):
        self.output, self._temporary = output, temporary
        with open(output, "wb") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env=program_environment(TMPDIR=str(temporary)), start_new_session=True,
            )  # fmt: skip

    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> int:
        """Returns the exit code, negative for a signal."""
        try:
            return self.process.wait(END_SEC)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise CampaignError(f"no end within {END_SEC} s") from None

    def text(self) -> str:
        """Returns the end of what was printed on both streams."""
        return self.output.read_text(encoding="utf-8", errors="replace")[-3000:]

    def processes(self) -> list[int]:
        """Returns the running processes of the command, itself included."""
        return list(processes_of(self._temporary))

    def check_no_process_is_left(self) -> None:
        end = time.monotonic() + 15
        while left := self.processes():
            check(time.monotonic() < end, f"processes left: {left}")
            time.sleep(0.1)

    def check_last_line(self, code: int) -> None:
        """Checks that no traceback was printed, and the last line of an error or interruption."""
        last = self.text().strip().rpartition("\n")[2]
        check("Traceback" not in self.text(), "a traceback")
        if 0 < code < 128 or code in (138, 142):
            check(last.startswith("error: ") and "; " in last, "no error with what to do")
        if code in (130, 143):
            told = last.startswith(("interrupted", "terminated", "a second"))
            check(told, "the interruption is not the last line")

    def kill_all(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Site:
    """The run directories of one strategy, and its training there."""

    def __init__(self, folder: pathlib.Path, strategy: str, choices: random.Random):
        self.words = [f"--strategy={strategy}", *DEVICES[strategy], *TRAIN]
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
        return Program(command, self._folder / "output.txt", self.temporary)

    def start_until_some_moment(self) -> Program:
        program = self.start()
        end = time.monotonic() + self.random.uniform(0, 1.1) * self.duration_sec
        while time.monotonic() < end and program.is_running():
            time.sleep(0.01)
        return program

    def finish(self) -> str:
        """Trains undisturbed to the end; returns the hash of the weights."""
        program = self.start()
        check(program.wait() == 0, f"{self.strategy}, undisturbed:\n{program.text()}")
        return self.finished_weights()

    def finished_weights(self) -> str:
        """Returns the hash of the weights of a finished run, after a check of its records."""
        summary = json.loads((self.run_dir / "summary.json").read_bytes())
        check(summary["status"] == "finished", f"status {summary['status']}")
        lines = (self.run_dir / "history.jsonl").read_bytes().splitlines()
        epochs = [json.loads(line)["epoch"] for line in lines]
        check(epochs == list(range(1, summary["epochs"] + 1)), f"a torn history: {epochs}")
        left = [path.name for path in self.run_dir.rglob(".*") if path.name != ".lock"]
        left += [path.name for path in self.temporary.iterdir()]
        check(not left, f"left behind: {left}")
        return summary["weights_sha256"]


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


def _failing_disk(site, actions, *expected):
    call = site.random.choice(("fsync", "replace", "unlink", "mkdir"))
    fault = f"{call}:{site.random.randint(1, 12)}:{site.random.choice(actions)}"
    return site.start(prefix=[*FAILING, fault]), fault, {0, *expected}


def _damaged(site):
    """Truncates the newest checkpoint, if there is an earlier one."""
    found, told = checkpoint_paths(site.run_dir), "nothing to damage"
    if len(found) > 1:
        os.truncate(found[-1], found[-1].stat().st_size // 2)
        told = f"damaged {found[-1].name}"
    return site.start(), told, {0}


def _worker(site, number):
    """Kills or freezes a process that the training has started; workers are restarted."""
    program = site.start_until_some_moment()
    others = [pid for pid in program.processes() if pid != program.process.pid]
    if others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(site.random.choice(others), number)
    return program, f"{number.name} to one of {len(others)} processes", {0, 138}


KINDS = {
    "SIGKILL": (_signals, signal.SIGKILL),
    "SIGTERM": (_signals, signal.SIGTERM),
    "SIGINT": (_signals, signal.SIGINT),
    "second signal": (_signals, signal.SIGTERM, signal.SIGINT),
    "damaged checkpoint": (_damaged,),
    "worker killed": (_worker, signal.SIGKILL),
    "worker frozen": (_worker, signal.SIGSTOP),
    "kill at a file operation": (_failing_disk, ["kill"], -9),
    "disk full": (_failing_disk, ["ENOSPC"], 8),
    "read-only": (_failing_disk, ["EROFS", "EIO"], 5, 8),
    "slow disk": (_failing_disk, ["slow"]),
}
OF_WORKERS = list(KINDS)[:7]


def _check_intact(checkpoint: pathlib.Path) -> None:
    """Checks a checkpoint against the hash in its header."""
    content = checkpoint.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    told = header["__metadata__"]["sha256"]
    sha256 = hashlib.sha256(content.replace(told.encode(), b"0" * 64, 1)).hexdigest()
    check(sha256 == told, f"{checkpoint} is damaged")


def cycle(site: Site, kind: str) -> str:
    """Starts a training, disturbs it, and checks what it leaves; returns what was done."""
    before = checkpoint_paths(site.run_dir)
    disturb, *arguments = KINDS[kind]
    program, told, expected = disturb(site, *arguments)
    try:
        code = program.wait()
        told = f"{site.strategy}: {told}, exit code {code}"
        check(code in expected, f"exit code {code}, not one of {expected}")
        if code >= 0 and "worker" not in kind:  # The other worker has a line.
            program.check_last_line(code)
        program.check_no_process_is_left()
        now = checkpoint_paths(site.run_dir)
        is_kept = not before or (now and now[-1].name >= before[-1].name)
        check(is_kept or kind == "damaged checkpoint", f"{before[-1:]} is lost")
        for path in now:
            _check_intact(path)
        if code == 0:
            check(site.finished_weights() == site.weights, "other weights")
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
