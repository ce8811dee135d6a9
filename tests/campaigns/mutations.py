"""Breaks one place of the program at a time and counts how many of these bugs the tests detect.

Tried are the bugs of `mutations.toml`, or with `--cycles` as many drawn at random: a statement that
is deleted, a condition that is negated, a number that is one more. Each is made in a copy of the
repository. The test files that are most likely to detect it run first, then the rest of
`make test`; both stop at the first failure. A test that also fails in the unchanged copy does not
count. Fails if fewer than 95 % are detected. Imports nothing of the program.
"""

import ast
import collections
import contextlib
import fnmatch
import multiprocessing.connection
import os
import pathlib
import random
import shutil
import signal
import sys
import tomllib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from . import check

ROOT = pathlib.Path(__file__).parents[2]
LIST = pathlib.Path(__file__).with_name("mutations.toml")
TIMEOUT_SEC = 1800
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tensorflow", "keras"])  # Once, not for every mutation.
NOT_COPIED = (".git", ".venv*", "runs", "__pycache__", ".*_cache")


class Mutation(NamedTuple):
    """A bug: the text `old`, which occurs once in a file of the program, becomes `new`."""

    name: str
    file: str
    old: str
    new: str


def listed() -> list[Mutation]:
    """Returns the bugs of the list, numbered from 1."""
    entries = tomllib.loads(LIST.read_text("utf-8"))["mutation"]
    return [Mutation(str(i), e["file"], e["old"], e["new"]) for i, e in enumerate(entries, 1)]


def drawn(count: int, seed: int) -> list[Mutation]:
    """Draws bugs, independent of the tests: the same ones from the same files and seed."""
    packages = ("app", "lockstep", "models", "strategies")
    paths = sorted(path for name in packages for path in (ROOT / name).rglob("*.py"))
    places = [(path, change) for path in paths for change in _changes(path.read_text("utf-8"))]
    mutations = []
    for path, (start, end, new) in random.Random(seed).sample(places, count):
        text = path.read_text("utf-8")
        first, last = text.rfind("\n", 0, start) + 1, text.find("\n", end)
        while text.count(text[first:last]) > 1:  # As many lines as make them unique.
            first = text.rfind("\n", 0, first - 1) + 1
        file, changed = str(path.relative_to(ROOT)), text[first:start] + new + text[end:last]
        name = f"drawn {len(mutations) + 1}"
        mutations.append(Mutation(name, file, text[first:last], changed))
    return mutations


def _changes(text: str) -> Iterator[tuple[int, int, str]]:
    """Yields start, end and new text of every change that can be made in a module."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))

    def place(node: ast.stmt | ast.expr) -> tuple[int, int]:
        ends = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
        start, end = (text.encode()[: starts[n - 1] + column] for n, column in ends)
        return len(start.decode()), len(end.decode())

    for node in ast.walk(ast.parse(text)):
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if is_call or isinstance(node, ast.AugAssign):
            yield *place(node), "pass"
        elif isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            start, end = place(node.test)
            yield start, end, f"not ({text[start:end]})"
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield *place(node), str(node.value + 1)


def copy_with(folder: pathlib.Path, *mutations: Mutation) -> pathlib.Path:
    """Copies the repository, makes changes in the copy, and returns it; it has no `.git`."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    if (ROOT / ".venv").exists():
        (copy / ".venv").symlink_to((ROOT / ".venv").resolve())
    for mutation in mutations:
        path = copy / mutation.file
        text = path.read_text("utf-8")
        check(text.count(mutation.old) == 1, f"{mutation} does not fit the program")
        path.write_text(text.replace(mutation.old, mutation.new), "utf-8")
    return copy


def _run_tests(copy: pathlib.Path, *arguments: str) -> list[str]:
    """Runs tests in a copy; returns those that failed. A run without an end counts as one."""
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
    # Passed, failed, or a file that cannot be imported.
    check(exit_code in (0, 1, 2), f"pytest ended with exit code {exit_code} for {arguments}")
    return failed


def _run_pytest(
    sending: multiprocessing.connection.Connection, copy: pathlib.Path, arguments: Sequence[str]
) -> None:
    """Runs in a process that has imported TensorFlow, and nothing of the program."""
    os.setsid()
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    nowhere, failed = os.open(os.devnull, os.O_RDWR), []
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)

    class Failures:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

        pytest_collectreport = pytest_runtest_logreport

    options = ["-p", "no:cacheprovider", "--tb=no", "-m", "not slow", "-x"]
    # That test would find each bug, since `old` is not in its file any more.
    options.append("--ignore=tests/campaigns/test_mutations.py")
    exit_code = pytest.main([*options, *arguments], plugins=[Failures()])
    sending.send((int(exit_code), failed))


def run(
    folder: pathlib.Path, cycles: int, seed: int, only: Sequence[str], counts: collections.Counter
) -> Iterator[str]:
    """Tries the bugs; yields what each one changes, and the test that notices it."""
    first = tomllib.loads(LIST.read_text("utf-8"))["first"]
    mutations = drawn(cycles, seed) if cycles else listed()
    noticed = []
    for mutation in [each for each in mutations if each.name in (only or each.name)]:
        copy = copy_with(folder, mutation)
        names = next((n for p, n in first.items() if fnmatch.fnmatch(mutation.file, p)), [])
        found = (next((copy / "tests").rglob(f"test_{name}.py")) for name in names)
        tests = [str(path.relative_to(copy)) for path in found]
        failed = _run_tests(copy, "-n0", *tests) if tests else []
        failed = failed or _run_tests(copy, *(f"--ignore={name}" for name in tests))
        noticed.append(failed[0] if failed else "")
        old, new = (" ".join(each.split()) for each in (mutation.old, mutation.new))
        yield f"{mutation.name}: {mutation.file}: `{old}` → `{new}`: {noticed[-1] or 'NO TEST'}"
    tests = sorted({name for name in noticed if name})
    broken = _run_tests(copy_with(folder), "--maxfail=1000", *tests) if tests else []
    check(not broken, f"{broken} fail without a mutation, too")
    counts["bugs"], counts["noticed"] = len(noticed), sum(map(bool, noticed))
    check(counts["noticed"] >= 0.95 * len(noticed), "too few bugs are noticed")
