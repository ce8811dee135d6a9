"""Cuts the power of a small training at each of its file operations.

`strace` records a training that is killed, resumed, prolonged and overwritten. For each prefix of
its operations, `disk` lists what may be on disk after a power cut. In each of these directories
every record with a final name must be complete, and no record may tell more than the newest
checkpoint. In a sample, the same command must finish with the weights of the recorded training.
"""

import collections
import dataclasses
import json
import pathlib
import random
import re
from collections.abc import Iterator, Sequence

from .disk import Disk, Operation, Tree, parse_operations, strace_command
from .harness import (
    EPOCHS,
    MAIN,
    TRAIN,
    CampaignError,
    Program,
    check,
    check_output,
    finished_weights,
    write_data,
)

RUN = "run"
RUNS_PER_CYCLE = 12
_REFUSED = 4


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One recorded command: a name, its flags, and the call of `fsync` that kills it."""

    name: str
    flags: tuple[str, ...]
    kill_at_sync: int = 0

    @property
    def overwrites(self) -> bool:
        """Whether it replaces a run with other settings."""
        return "--overwrite" in self.flags


def attempts(choices: random.Random) -> list[Attempt]:
    """Returns the attempts of a training."""
    first, other = (f"--epochs={EPOCHS}",), (f"--epochs={EPOCHS}", "--seed=1", "--overwrite")
    return [
        Attempt("killed", first, choices.randint(1, 30)),
        Attempt("finished", first),
        Attempt("prolonged", (f"--epochs={EPOCHS + 1}",)),
        Attempt("overwritten and killed", other, choices.randint(1, 12)),
        Attempt("overwritten", other),
    ]


class Recording:
    """The attempts of one training, and the directories that a power cut may leave of them.

    Args:
        folder: folder for all files.
        seed: seed of all random choices.
        counts: numbers of what was done.
    """

    def __init__(self, folder: pathlib.Path, seed: int, counts: collections.Counter[str]):
        self._folder, self._root, self._counts = folder, folder / "root", counts
        self._root.mkdir(parents=True)
        self._random, self._disk = random.Random(seed), Disk({})
        self._environment = {"FASHION_MNIST_DIR": str(write_data(folder / "data"))}
        self._published: dict[str, set[frozenset]] = collections.defaultdict(set)
        self._in_place: set[str] = set()
        self._states: dict[Attempt, list[Tree]] = {}
        self._weights: dict[tuple[str, ...], str] = {}

    def check_states(self, num_attempts: int | None = None) -> Iterator[str]:
        """Records the attempts, and checks each state that a power cut may leave."""
        for attempt in attempts(self._random)[:num_attempts]:
            operations, seen = self._record(attempt), {}
            for number, operation in enumerate(operations, start=1):
                self._disk.apply(operation)
                if operation.kind == "write":  # In place, as of the event file.
                    self._in_place.add(operation.path)
                if operation.kind == "rename" and not _is_hidden(operation.target):
                    tree = self._disk.tree(operation.target)
                    self._published[operation.target].add(frozenset(tree.items()))
                self._counts["prefixes"] += 1
                for tree in self._disk.states(self._random):
                    key = frozenset(tree.items())
                    if key not in seen:
                        seen[key] = tree
                        problem = self._problem(tree)
                        check(not problem, f"{attempt.name}, operation {number}: {problem}")
            self._compare_with_directory()
            self._states[attempt] = list(seen.values())
            self._counts["states"] += len(seen)
            yield f"{attempt.name}: {len(operations)} operations, {len(seen)} states"

    def resume_sample(self, num_runs: int) -> Iterator[str]:
        """Runs the same command in some of the states."""
        for number in range(num_runs):
            attempt = self._random.choice(list(self._states))
            run_dir = self._folder / f"sample {number}" / RUN
            self._write(self._random.choice(self._states[attempt]), run_dir.parent)
            program = self._start(attempt, run_dir, MAIN)
            code = program.wait()
            check_output(program, code)
            # Before its files are removed, the earlier run has other settings.
            if code == _REFUSED and attempt.overwrites:
                self._counts["refused runs"] += 1
            else:
                check(code == 0, f"{attempt.name}: code {code}: {program.last_line()}")
                weights = finished_weights(run_dir)
                check(weights == self._weights[attempt.flags], f"{attempt.name}: other weights")
                self._counts["resumed runs"] += 1
            yield f"resumed after a power cut in {attempt.name}: code {code}"

    def _start(self, attempt: Attempt, run_dir: pathlib.Path, command: Sequence[str]) -> Program:
        words = [*command, *TRAIN, *attempt.flags, f"--out={run_dir}"]
        return Program(words, self._folder / "output.txt", self._environment)

    def _record(self, attempt: Attempt) -> list[Operation]:
        recording = self._folder / "recording"
        command = strace_command(MAIN, recording, attempt.kill_at_sync)
        program = self._start(attempt, self._root / RUN, command)
        code = program.wait()
        expected = -9 if attempt.kill_at_sync else 0
        check(code == expected, f"{attempt}: code {code}\n{program.text()[-2000:]}")
        if code == 0:
            self._weights[attempt.flags] = finished_weights(self._root / RUN)
        return parse_operations(recording, self._root)

    def _problem(self, tree: Tree) -> str:
        """Returns what is wrong with the directory after a power cut; empty if nothing is."""
        units: dict[str, dict[str, str | None]] = collections.defaultdict(dict)
        for path, content in tree.items():
            for unit in self._published.keys() & {path, *_parents(path)} - self._in_place:
                units[unit][path[len(unit) + 1 :]] = content
        for unit, content in units.items():
            parts = frozenset((k, v) for k, v in content.items() if k or v is not None)
            if parts not in self._published[unit]:
                return f"{unit} is not complete"
        names = [path for path in tree if re.fullmatch(rf"{RUN}/checkpoints/step-[^/]*", path)]
        newest = max((int(name.rpartition("-")[2]) for name in names), default=None)
        history, summary = (self._lines(tree, n) for n in ("history.jsonl", "summary.json"))
        if newest is not None and len(history) > newest:
            return f"a history of {len(history)} epochs, but the newest checkpoint has {newest}"
        if newest is not None and summary:
            told = json.loads(b"".join(summary))
            if told["status"] == "finished" and told["epochs"] > newest:
                return f"finished, but the newest checkpoint has {newest} epochs"
        return ""

    def _lines(self, tree: Tree, name: str) -> list[bytes]:
        content = tree.get(f"{RUN}/{name}")
        return self._disk.contents[content].splitlines() if content else []

    def _compare_with_directory(self) -> None:
        """Checks that the replayed operations give the real directory."""
        root, contents = self._root, self._disk.contents
        found = {str(p.relative_to(root)): p.is_dir() or p.read_bytes() for p in root.rglob("*")}
        tree = self._disk.tree()
        replayed = {path: content is None or contents[content] for path, content in tree.items()}
        wrong = sorted(p for p in found | replayed if found.get(p) != replayed.get(p))
        if wrong:
            raise CampaignError(f"the recording is not complete: {wrong}")

    def _write(self, tree: Tree, root: pathlib.Path) -> None:
        root.mkdir()
        for path, content in tree.items():
            if content is None:
                (root / path).mkdir()
            else:
                (root / path).write_bytes(self._disk.contents[content])


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]


def run(
    folder: pathlib.Path, cycles: int, seed: int, only: Sequence[str], counts: collections.Counter
) -> Iterator[str]:
    """Records trainings of several seeds and checks them; yields what was done."""
    for number in range(cycles):
        recording = Recording(folder / f"cycle {number}", seed + number, counts)
        is_short = "short" in only  # The first two attempts.
        yield from recording.check_states(2 if is_short else None)
        yield from recording.resume_sample(3 if is_short else RUNS_PER_CYCLE)
