"""Cuts the power of a small training at each of its file operations: `make power-loss`.

`strace` records a training that is killed, terminated, resumed, prolonged and overwritten. For each
prefix of its operations, `crash_states` lists what may be on disk after a power cut. In each of
these directories every record must be complete, and every checkpoint must exist whose name
was synced. In a sample, the same command must finish with the weights of the recorded training.
"""

import argparse
import collections
import dataclasses
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import process_functions
from app.records.checkpoint import checkpoint_paths, find_newest_checkpoint
from app.records.history import HISTORY_FILE, SUMMARY_FILE, load_history, load_summary
from app.records.run_directory import (
    CONFIG_FILE,
    LOCK_FILE,
    LOG_FILE,
    load_run_config,
    open_run_directory,
)
from app.report.page import write_report
from app.runtime.errors import LockstepError
from app.runtime.processes import call_in_child_process
from app.runtime.run_context import RunContext
from crash_states import Disk, Operation, Tree, parse_operations, record_operations
from idx_files import write_data

TRAIN = (
    *("--device=cpu", "--recipe=fast", "--deterministic", "--allow_unverified_data"),
    *("--global_batch_size=50", "--checkpoint_every=3", "--steps_per_call=1"),
)
EPOCHS, STEPS_PER_EPOCH = 3, 10
TIMEOUT_SEC = 240
RUN = "run"
# Files that are written in place; all others appear under their names when they are complete.
IN_PLACE = {LOCK_FILE, LOG_FILE}
VERIFY = (
    *("verify", "--strategies=single,manual", "--device=cpu", "--num_devices=2", "--recipe=fast"),
    *("--allow_unverified_data", "--global_batch_size=50"),
)
REFUSED_EXIT_CODE = 4
_MOST_KEPT_OF_A_CLASS = 50
_FIRST_REMOVED = f"{RUN}/{SUMMARY_FILE}", f"{RUN}/checkpoints"  # By an attempt that overwrites.
# Step and epoch of a checkpoint.
Saved = tuple[int, int]
NOTHING: Saved = (0, 0)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One recorded command.

    Attributes:
        name: what happens to it.
        flags: its flags, besides those of all attempts of the command.
        command: its words and the flags of all attempts.
        exit_code: its exit code.
        overwrites: whether it also has the flag `--overwrite`.
        kill_at_sync: the call of `fsync` at which it is killed; 0 for none.
        is_terminated: whether it gets SIGTERM in the evaluation of an epoch.
        is_cut: whether the next attempt starts in one of the directories after a power cut in it,
            and not in what it has left.
    """

    name: str
    flags: tuple[str, ...]
    command: tuple[str, ...] = TRAIN
    exit_code: int = 0
    overwrites: bool = False
    kill_at_sync: int = 0
    is_terminated: bool = False
    is_cut: bool = False


def training(chooser: random.Random) -> list[Attempt]:
    """Returns the attempts of a training."""
    first, longer = (f"--epochs={EPOCHS}",), (f"--epochs={EPOCHS + 1}",)
    other = (*first, "--seed=1")
    return [
        Attempt("killed", first, kill_at_sync=chooser.randint(1, 30)),
        Attempt("killed again", first, kill_at_sync=chooser.randint(1, 30)),
        Attempt("cut", first, is_cut=True),
        Attempt("terminated", first, is_terminated=True),
        Attempt("finished", first),
        Attempt("prolonged", longer, is_cut=True),
        Attempt("prolonged again", longer),
        Attempt("overwritten", other, overwrites=True),
        Attempt("overwritten again", other, overwrites=True, kill_at_sync=chooser.randint(1, 12)),
        Attempt("finished again", other, overwrites=True),
    ]


def mismatch(chooser: random.Random) -> list[Attempt]:
    """Returns a training that ends with the trace of a mismatch, and one that has none."""
    step = chooser.randint(2, STEPS_PER_EPOCH)
    flags = f"--epochs={EPOCHS}", f"--inject=drop_gradient:replica=1,step={step}"
    return [
        Attempt("mismatch", (*flags, "--verify_every=1"), exit_code=9),
        Attempt("mismatch replaced", (*flags, "--verify_every=1"), exit_code=9),
        Attempt("mismatch overwritten", flags[:1], overwrites=True),
    ]


def verification(_: random.Random) -> list[Attempt]:
    """Returns two verifications that keep their traces, the second in place of the first."""
    flags = "--keep_traces", "--steps=2"
    return [
        Attempt("verified", flags, VERIFY),
        Attempt("verified again", flags, VERIFY, overwrites=True),
    ]


@dataclasses.dataclass(frozen=True)
class State:
    """A directory after a power cut.

    Attributes:
        attempt: the attempt in which the power was cut.
        operation: number of operations of the attempt before it.
        tree: what is on disk.
        reported: the newest checkpoint whose name was synced.
        is_replaced: whether the attempt has begun to remove the files of an earlier run.
    """

    attempt: Attempt
    operation: int
    tree: Tree
    reported: Saved
    is_replaced: bool


class Recorder:
    """Records the attempts of one training.

    Args:
        folder: folder for all files.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder, self.root = folder, folder / "root"
        self.root.mkdir()
        self.data_dir = folder / "data"
        write_data(self.data_dir)
        self.weights: dict[tuple[str, ...], str] = {}  # Flags → `weights_sha256` at the end.

    def record(self, attempt: Attempt) -> list[Operation]:
        """Runs an attempt and returns its operations."""
        output = self._folder / "recording"
        overwrite = ["--overwrite"] if attempt.overwrites else []
        words = [*attempt.command, *attempt.flags, *overwrite]
        command = [sys.executable, str(ROOT / "main.py"), *words]
        environment = {**os.environ, "FASHION_MNIST_DIR": str(self.data_dir)}
        run_dir = self.root / RUN
        process = record_operations(
            [*command, f"--out={run_dir}"], self.root, environment, output, attempt.kill_at_sync
        )
        if attempt.is_terminated:
            _terminate_in_evaluation(run_dir, process.poll)
        code = process.wait(TIMEOUT_SEC)
        expected = 143 if attempt.is_terminated else attempt.exit_code
        expected = -signal.SIGKILL if attempt.kill_at_sync else expected
        if code != expected:
            told = output.with_suffix(".txt").read_text(encoding="utf-8")
            raise RuntimeError(f"{attempt} ended with {code}, not {expected}\n{told[-2000:]}")
        if code == 0 and attempt.command == TRAIN:
            self.weights[attempt.flags] = load_summary(run_dir).weights_sha256
        return parse_operations(output, self.root)


def _terminate_in_evaluation(run_dir: pathlib.Path, poll: Callable[[], int | None]) -> None:
    """Sends SIGTERM after the last step of an epoch, before the epoch is saved."""
    while poll() is None:
        names = [path.name for path in checkpoint_paths(run_dir)]
        if any(int(name.split("-")[1]) % STEPS_PER_EPOCH == STEPS_PER_EPOCH - 2 for name in names):
            time.sleep(0.2)
            os.kill(int((run_dir / LOCK_FILE).read_text(encoding="ascii")), signal.SIGTERM)
            return
        time.sleep(0.002)


class Campaign:
    """Replays a recorded training and checks the directories after power cuts.

    Args:
        folder: folder for all files.
        seed: seed of all random choices.
        attempts: function that returns the attempts to record.
        num_attempts: number of them; None for all.

    Attributes:
        problems: kind → what is wrong, and the first state where it is.
        counts: numbers of what was done.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        seed: int,
        attempts: Callable[[random.Random], list[Attempt]] = training,
        num_attempts: int | None = None,
    ) -> None:
        self._folder, self._random = folder, random.Random(seed)
        self._recorder, self._disk = Recorder(folder), Disk({})
        self._attempts = attempts(self._random)[:num_attempts]
        self._published: dict[str, set[frozenset]] = collections.defaultdict(set)
        self._checker = Checker(folder / "scratch", self._disk.contents)
        self._classes: dict[Any, list[State]] = collections.defaultdict(list)
        self.problems: dict[str, tuple[str, State]] = {}
        self.counts: collections.Counter[str] = collections.Counter()

    def check_states(self) -> None:
        """Records the attempts, and checks each state that a power cut may leave."""
        named, reported, is_replaced = NOTHING, NOTHING, False
        for attempt in self._attempts:
            operations = self._recorder.record(attempt)
            seen: dict[Any, State] = {}
            is_replaced = is_replaced and not attempt.overwrites
            for number, operation in enumerate(operations, start=1):
                self._disk.apply(operation)
                self._publish(operation)
                if attempt.overwrites and _begins_to_remove(operation):
                    named, reported, is_replaced = NOTHING, NOTHING, True
                named = max(named, _saved(operation))
                if (operation.kind, operation.path) == ("sync", f"{RUN}/checkpoints"):
                    reported = named
                self.counts["prefixes"] += 1
                for tree in self._disk.states(self._random):
                    self.counts["states"] += 1
                    key = (frozenset(tree.items()), reported, is_replaced)
                    if key not in seen:
                        seen[key] = State(attempt, number, tree, *key[1:])
                        self._check(seen[key])
            self._compare_with_directory()
            if attempt.is_cut:
                early = [each for each in seen.values() if each.reported[1] < EPOCHS - 1]
                state = self._random.choice(early or list(seen.values()))
                reported, is_replaced = state.reported, state.is_replaced
                named = reported
                self._cut(state.tree)

    def run_sample(self, num_runs: int) -> None:
        """Runs the same command in a state of each class, in random order, up to a number."""
        groups = [self._classes[key] for key in sorted(self._classes, key=repr)]
        self._random.shuffle(groups)
        chosen = [self._random.choice(group) for group in groups]
        chosen += [self._random.choice(group) for group in groups * (num_runs // len(groups))]
        with ThreadPoolExecutor(2) as threads:
            calls = []
            for number, state in enumerate(chosen[:num_runs]):
                run_dir = self._folder / f"sample {number}" / RUN
                self._write(state.tree, run_dir.parent)
                self._check_report(state, run_dir)
                argv = ["main.py", *TRAIN, *state.attempt.flags, f"--out={run_dir}"]
                output = self._folder / f"sample {number}.txt"
                data_dir = str(self._recorder.data_dir)
                call = threads.submit(
                    call_in_child_process, process_functions.train, argv, str(output), data_dir
                )
                calls.append((call, state, run_dir, output))
                if len(calls) > 2:
                    self._check_run(*calls.pop(0))
            for each in calls:
                self._check_run(*each)

    def _cut(self, tree: Tree) -> None:
        """Replaces the recorded directory by one after a power cut."""
        root, contents = self._recorder.root, self._disk.contents
        shutil.rmtree(root)
        self._disk = Disk(contents)
        self._disk.load(tree, contents)
        self._write(tree, root)

    def _publish(self, operation: Operation) -> None:
        """Notes the content that a file or a directory gets with its final name."""
        if operation.kind in ("rename", "exchange") and _is_final(operation.target):
            tree = self._disk.tree(operation.target)
            self._published[operation.target].add(frozenset(tree.items()))

    def _check(self, state: State) -> None:
        self.counts["distinct states"] += 1
        facts, found = self._checker.facts(state.tree)
        problems = [*found, *self._incomplete(state.tree), *_unkept(state, facts)]
        for problem in problems:
            self._report(problem, state)
        shown = facts
        group = self._classes[state.attempt.name, repr(shown)]
        if len(group) < _MOST_KEPT_OF_A_CLASS:
            group.append(state)

    def _incomplete(self, tree: Tree) -> Iterator[str]:
        """Yields files and directories whose content is not that of their final names."""
        units: dict[str, dict[str, str | None]] = collections.defaultdict(dict)
        for path, content in tree.items():
            parts = path.split("/")
            length = 3 if parts[1:2] == ["checkpoints"] else 2
            unit, rest = "/".join(parts[:length]), "/".join(parts[length:])
            if len(parts) < length or not _is_final(unit):
                continue
            if rest or content is not None:
                units[unit][rest] = content
            else:
                units[unit] = units[unit]  # A directory.
        for unit, content in units.items():
            if frozenset(content.items()) not in self._published[unit]:
                yield f"{unit} is not complete"

    def _compare_with_directory(self) -> None:
        """Checks that the replayed operations give the real directory."""
        root, tree = self._recorder.root, self._disk.tree()
        found = {str(p.relative_to(root)): p.is_dir() or p.read_bytes() for p in root.rglob("*")}
        replayed = {
            path: content is None or self._disk.contents[content] for path, content in tree.items()
        }
        if found != replayed:
            differing = {p for p in found | replayed if found.get(p) != replayed.get(p)}
            raise RuntimeError(f"the recording is not complete: {sorted(differing)}")

    def _write(self, tree: Tree, root: pathlib.Path) -> None:
        root.mkdir(exist_ok=True)
        for path, content in tree.items():
            target = root / path
            if content is None:
                target.mkdir()
            else:
                target.write_bytes(self._disk.contents[content])

    def _check_run(self, call, state, run_dir, output) -> None:
        """Checks the result of a command that was run after a power cut."""
        code, told = call.result(), output.read_text(encoding="utf-8", errors="replace")
        self.counts["runs"] += 1
        last, problem = told.rstrip().rpartition("\n")[2], ""
        # With `--overwrite`: before its files are removed, the earlier run has other settings;
        # afterwards, there may be parts of its records.
        may_refuse = state.attempt.overwrites and not state.is_replaced
        may_refuse = may_refuse or (state.is_replaced and state.reported == NOTHING)
        if code == REFUSED_EXIT_CODE and may_refuse:
            self.counts["refused runs"] += 1
            if not last.startswith("error: "):
                problem = "refused without a line"
        elif code != 0:
            problem = f"the command ended with {code}: {last}"
        else:
            summary, history = load_summary(run_dir), load_history(run_dir)
            left = [p.name for p in run_dir.rglob(".*") if p.name != LOCK_FILE]
            if summary.weights_sha256 != self._recorder.weights.get(state.attempt.flags):
                problem = "the command ended with other weights"
            elif summary.status != "finished" or len(history) != summary.epochs:
                problem = "the command did not finish the records"
            elif left:
                problem = f"the command left {left}"
        if problem:
            self._report(problem, state)
        else:
            shutil.rmtree(run_dir.parent)

    def _check_report(self, state: State, run_dir: pathlib.Path) -> None:
        """Checks that `report` accepts the records, if the run was started."""
        if f"{RUN}/{CONFIG_FILE}" in state.tree:
            try:
                write_report([run_dir], self._folder / "report.html")
            except Exception as error:
                self._report(f"report: {type(error).__name__}: {error}", state)

    def _report(self, problem: str, state: State) -> None:
        """Notes a problem; those that differ only in numbers count as one."""
        self.counts["problems"] += 1
        key = re.sub(r"[\d.]+|(?<=byte )0x..", "#", f"{state.attempt.name}: {problem}")
        self.problems.setdefault(key, (problem, state))


def _begins_to_remove(operation: Operation) -> bool:
    """Returns whether an attempt that overwrites removes what makes a run of the directory."""
    return operation.kind in ("remove", "rename") and operation.path in _FIRST_REMOVED


def _is_final(path: str) -> bool:
    """Returns whether a file or directory has its name only when it is complete."""
    name = path.rpartition("/")[2]
    return not name.startswith(".") and name not in {*IN_PLACE, RUN, "checkpoints"}


def _saved(operation: Operation) -> Saved:
    """Returns the step and the epoch of the checkpoint to which an operation gives its name."""
    name = re.fullmatch(rf"{RUN}/checkpoints/step-(\d+)-epoch-(\d+)", operation.target or "")
    return (int(name[1]), int(name[2])) if operation.kind == "rename" and name else NOTHING


def _unkept(state: State, facts: dict[str, Any]) -> Iterator[str]:
    """Yields what was reported and is not on disk, and records of different runs."""
    newest, seed, damaged = facts["checkpoints"] or (NOTHING, None, 0)
    if newest < state.reported:
        yield f"checkpoint {state.reported} was reported, the newest is {newest}"
    if damaged:
        yield f"{damaged} damaged checkpoints"
    config, summary = facts[CONFIG_FILE], facts[SUMMARY_FILE]
    if summary and summary["seed"] != config["seed"]:
        yield "configuration and summary of different runs"
    if seed is not None and seed != config["seed"]:
        yield "configuration and checkpoint of different runs"
    if summary and summary["status"] == "finished" and newest[1] < summary["epochs"]:
        yield f"finished after {summary['epochs']} epochs, but the newest checkpoint is {newest}"
    # While the files of an earlier run are removed, its history without checkpoints is refused.
    is_refused = state.is_replaced and facts["checkpoints"] is None
    if (facts[HISTORY_FILE] or 0) > newest[1] and not is_refused:
        yield f"a history of {facts[HISTORY_FILE]} epochs, but the newest checkpoint is {newest}"


class Checker:
    """Reads the records of a directory after a power cut with the program's own functions.

    Equal records are read once.

    Args:
        scratch: folder for copies.
        contents: SHA-256 → content.
    """

    def __init__(self, scratch: pathlib.Path, contents: dict[str, bytes]) -> None:
        self._scratch, self._contents = scratch, contents
        self._known: dict[Any, tuple[Any, str]] = {}

    def facts(self, tree: Tree) -> tuple[dict[str, Any], list[str]]:
        """Returns what the records say, by name, and the errors of reading them."""
        facts: dict[str, Any] = {}
        problems = []
        tree = {path.partition("/")[2]: content for path, content in tree.items()}
        tree.pop("", None)
        parts = {name: {name: tree[name]} for name in READERS if name in tree}
        parts["checkpoints"] = {p: c for p, c in tree.items() if p.startswith("checkpoints")}
        names = {p: "" if c is not None and p != CONFIG_FILE else c for p, c in tree.items()}
        parts["names"] = names
        for name, read in READERS.items():
            facts[name] = None
            if part := parts.get(name):
                facts[name], problem = self._read(name, read, part)
                problems += [problem] if problem else []
        return facts, problems

    def _read(self, name: str, read: Callable, part: Tree) -> tuple[Any, str]:
        key = name, frozenset(part.items())
        if key not in self._known:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch.mkdir()
            for path, content in part.items():
                if content is None:
                    (self._scratch / path).mkdir()
                else:
                    (self._scratch / path).write_bytes(self._contents.get(content, b""))
            try:
                self._known[key] = read(self._scratch), ""
            except Exception as error:
                kind = "" if isinstance(error, LockstepError) else f"{type(error).__name__}: "
                self._known[key] = None, f"{name}: {kind}{error}".replace(str(self._scratch), "")
        return self._known[key]


def _read_checkpoints(run_dir: pathlib.Path) -> tuple[Saved, int, int] | None:
    found = find_newest_checkpoint(run_dir)
    if found is None:
        return None
    progress, metadata = found.checkpoint.progress, found.checkpoint.metadata
    return (progress.step, progress.epoch), metadata.config["seed"], len(found.damaged)


def _read_summary(run_dir: pathlib.Path) -> dict[str, Any] | None:
    summary = load_summary(run_dir)
    return {name: getattr(summary, name) for name in ("status", "epochs", "seed")}


def _open(run_dir: pathlib.Path) -> None:
    with RunContext(), open_run_directory(run_dir, {}):
        pass


# Name of a record, or "names" for the names of all → function that reads it.
READERS: dict[str, Callable[[pathlib.Path], Any]] = {
    "checkpoints": _read_checkpoints,
    CONFIG_FILE: lambda run_dir: {"seed": load_run_config(run_dir)["seed"]},
    HISTORY_FILE: lambda run_dir: len(load_history(run_dir)),
    SUMMARY_FILE: _read_summary,
    "names": _open,
}


def main() -> int:
    """Checks recordings of several seeds; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cycles", type=int, default=3, help="recordings")
    parser.add_argument("--runs", type=int, default=60, help="resumed trainings of each recording")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(f"power loss: {options.cycles} recordings, --seed={options.seed}", flush=True)
    start, failed, total = time.monotonic(), False, collections.Counter()
    for seed in range(options.seed, options.seed + options.cycles):
        for attempts in (mismatch, verification, training):
            with tempfile.TemporaryDirectory(prefix="power-") as folder:
                campaign = Campaign(pathlib.Path(folder).resolve(), seed, attempts)
                campaign.check_states()
                if options.runs and attempts == training:
                    campaign.run_sample(options.runs)
            total += campaign.counts
            print(f"{attempts.__name__}, --seed={seed}: {dict(campaign.counts)}", flush=True)
            for problem, state in campaign.problems.values():
                where = f"{state.attempt.name}, operation {state.operation}"
                print(f"  {where}: {problem}", flush=True)
            failed = failed or bool(campaign.problems)
    minutes = (time.monotonic() - start) / 60
    counts = ", ".join(f"{count:,} {name}" for name, count in total.items())
    verdict = "problems found" if failed else "all states held"
    print(f"power loss: {verdict}, --seed={options.seed}: {counts}; {minutes:.1f} min")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
