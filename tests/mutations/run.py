"""Breaks one line of the program at a time and counts how many of these bugs the tests detect.

    python tests/mutations/run.py [--only=3,17] [--jobs=1] [--first_only]

Each mutation of `mutations.toml` is made in a copy of the repository. The test files that are most
likely to detect it run first, then the rest of `make test`; both stop at the first failure. A test
that also fails in the unchanged copy does not count. Exits with 1 if fewer than 95 % are detected,
or if a mutation does not fit the program.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import functools
import multiprocessing.connection
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import tomllib

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
ROOT = pathlib.Path(__file__).parents[2]
LIST = pathlib.Path(__file__).with_name("mutations.toml")
MIN_NOTICED = 0.95
TIMEOUT_SEC = 1800
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tensorflow", "keras"])  # Once, not for every mutation.
NOT_COPIED = (".git", ".venv*", "runs", "__pycache__", ".*_cache", "mutations")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One bug.

    Attributes:
        number: its position in the list, from 1.
        file: the file of the program, relative to the root.
        old: the text that is replaced; it occurs exactly once in the file.
        new: the text that replaces it.
        why: why it is a realistic bug, or how it was drawn.
        tests: test files that run first.
    """

    number: int
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]

    def line_number(self, text: str) -> int:
        """Returns the number of the first line that differs."""
        same = next(
            (i for i, (a, b) in enumerate(zip(self.old, self.new, strict=False)) if a != b),
            min(len(self.old), len(self.new)),
        )
        return text[: text.index(self.old) + same].count("\n") + 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of testing a mutation; `noticed_by` is empty if no test failed."""

    mutation: Mutation
    line_number: int
    noticed_by: str
    sec: float


def load_mutations() -> list[Mutation]:
    """Reads the list and checks that every mutation fits the program; exits with 1 otherwise."""
    content = tomllib.loads(LIST.read_text(encoding="utf-8"))
    mutations, problems = [], []
    for number, entry in enumerate(content["mutation"], start=1):
        file, old, new = entry["file"], entry["old"], entry["new"]
        path = ROOT / file
        count = path.read_text(encoding="utf-8").count(old) if path.is_file() else 0
        if count != 1 or old == new:
            problems.append(f"mutation {number}: {old!r} occurs {count} times in {file}")
        mutations.append(
            Mutation(number, file, old, new, entry["why"], first_tests(file, content["first"]))
        )
    if problems:
        sys.exit("\n".join(f"error: {problem}; 1 is required" for problem in problems))
    return mutations


def first_tests(file: str, first: dict[str, list[str]]) -> tuple[str, ...]:
    """Returns the test files to run first for a mutated file: those of the first pattern."""
    names = next((names for pattern, names in first.items() if fnmatch.fnmatch(file, pattern)), [])
    return tuple(f"tests/test_{name}.py" for name in names)


def copy_repository(folder: pathlib.Path) -> pathlib.Path:
    """Copies the repository and returns the copy; the environment is shared."""
    copy = folder / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    if (ROOT / ".venv").exists():
        (copy / ".venv").symlink_to((ROOT / ".venv").resolve())
    return copy


def run_tests(copy: pathlib.Path, *arguments: str) -> list[str]:
    """Runs tests in a copy; returns the names of those that failed.

    A run that does not end within half an hour counts as a failure.
    """
    receiving, sending = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_run_pytest, args=(sending, copy, arguments))
    process.start()
    sending.close()
    try:
        if not receiving.poll(TIMEOUT_SEC):
            return [f"no end within {TIMEOUT_SEC // 60} minutes"]
        exit_code, failed = receiving.recv()
    except EOFError:
        return ["the tests ended all at once"]
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # Its child processes end, too.
        process.join()
    if exit_code not in (0, 1, 2):  # Passed, failed, or a file that cannot be imported.
        sys.exit(f"error: pytest ended with exit code {exit_code} for {' '.join(arguments)}")
    return failed


def _run_pytest(
    sending: multiprocessing.connection.Connection, copy: pathlib.Path, arguments: tuple[str, ...]
) -> None:
    """Runs in a process that has imported TensorFlow, and nothing of the program."""
    os.setsid()
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    failures = _Failures()
    options = ["-p", "no:cacheprovider", "--tb=no", "-m", "not slow", "-x"]
    exit_code = pytest.main([*options, *arguments], plugins=[failures])
    sending.send((int(exit_code), failures.names))


class _Failures:
    """A pytest plugin that records failures."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.names.append(f"{report.nodeid}, which cannot be imported")


def try_mutation(mutation: Mutation, *, first_only: bool) -> Outcome:
    """Makes one mutation in a separate copy and runs the tests until one fails."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation") as folder:
        copy = copy_repository(pathlib.Path(folder))
        text = (copy / mutation.file).read_text(encoding="utf-8")
        mutated = text.replace(mutation.old, mutation.new)
        (copy / mutation.file).write_text(mutated, encoding="utf-8")
        failed = run_tests(copy, "-n0", *mutation.tests) if mutation.tests else []
        if not failed and not first_only:
            failed = run_tests(copy, *(f"--ignore={name}" for name in mutation.tests))
    noticed_by = failed[0] if failed else ""
    return Outcome(mutation, mutation.line_number(text), noticed_by, time.monotonic() - begin)


def failing_anyway(outcomes: list[Outcome]) -> set[str]:
    """Returns the failing tests that also fail in an unchanged copy."""
    tests = sorted({o.noticed_by for o in outcomes if "::" in o.noticed_by})
    if not tests:
        return set()
    with tempfile.TemporaryDirectory(prefix="mutation") as folder:
        copy = copy_repository(pathlib.Path(folder))
        return set(run_tests(copy, "--maxfail=1000", *tests))


def print_outcome(outcome: Outcome) -> None:
    """Prints one row of the table."""
    mutation = outcome.mutation
    old, new = (" ".join(text.split()) for text in (mutation.old, mutation.new))
    print(
        f"| {mutation.number} | {mutation.file}:{outcome.line_number} | `{old}` → `{new}` |"
        f" {outcome.noticed_by or 'NO TEST'} | {outcome.sec:.0f} |",
        flush=True,
    )


def main() -> None:
    """Tries the mutations, prints a table and the count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="numbers of mutations, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="how many are tried at once")
    parser.add_argument("--first_only", action="store_true", help="leave the rest of the tests out")
    arguments = parser.parse_args()
    mutations = load_mutations()
    if arguments.only:
        chosen = {int(number) for number in arguments.only.split(",")}
        mutations = [mutation for mutation in mutations if mutation.number in chosen]
    print("| # | line | change | noticed by | seconds |\n| --- | --- | --- | --- | --- |")
    outcomes = []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        attempt = functools.partial(try_mutation, first_only=arguments.first_only)
        for outcome in pool.map(attempt, mutations):
            outcomes.append(outcome)
            print_outcome(outcome)
    broken = failing_anyway(outcomes)
    for name in sorted(broken):
        print(f"error: {name} fails without a mutation, too")
    noticed = sum(bool(o.noticed_by) and o.noticed_by not in broken for o in outcomes)
    print(f"{noticed} of {len(outcomes)} noticed")
    sys.exit(bool(broken) or noticed < MIN_NOTICED * len(outcomes))


if __name__ == "__main__":
    main()
