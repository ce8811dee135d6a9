"""Breaks one place of the program at a time and counts how many of these bugs the tests detect.

Tried are the bugs of `mutations.toml`, or with `--cycles` as many drawn at random, half of them in
`lockstep/engine` and `lockstep/data`: a statement that is deleted, a condition that is negated, a
bound that is moved, a number that is one more. Each is made in a copy of the repository, where the
files of tests that run its lines are run until a test fails; coverage finds these beforehand, in a
quarter of an hour, for which all have to pass. Fails if fewer than 95 % are detected. Imports
nothing of the program.
"""

import ast
import collections
import contextlib
import itertools
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from typing import NamedTuple

import coverage

from . import check

ROOT = pathlib.Path(__file__).parents[2]
LIST = pathlib.Path(__file__).with_name("mutations.toml")
PROGRAM = ("app", "lockstep", "models", "strategies")
JUDGE = ("lockstep/engine/", "lockstep/data/")
TIMEOUT_SEC, START_SEC = 3600, 10
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-n0")
NOT_COPIED = (".git", ".venv*", "runs", "__pycache__", ".*_cache")
MOVED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
# It would find each bug, since `old` is not in its file any more.
OF_THE_LIST = "tests/campaigns/test_campaigns.py::test_the_list_of_bugs_fits_the_program"


class Mutation(NamedTuple):
    """A bug: the text `old`, which occurs once in a file of the program, becomes `new`."""

    name: str
    file: str
    old: str
    new: str

    def changed(self, text: str) -> str:
        """Returns the text of the file with the bug."""
        check(text.count(self.old) == 1, f"{self} does not fit the program")
        return text.replace(self.old, self.new)


def listed() -> list[Mutation]:
    """Returns the bugs of the list, numbered from 1."""
    entries = tomllib.loads(LIST.read_text("utf-8"))["mutation"]
    return [Mutation(str(i), e["file"], e["old"], e["new"]) for i, e in enumerate(entries, 1)]


def drawn(count: int, seed: int) -> list[Mutation]:
    """Draws bugs, independent of the tests: the same ones from the same files and seed."""
    choose, mutations = random.Random(seed), list[Mutation]()
    paths = sorted(path for name in PROGRAM for path in (ROOT / name).rglob("*.py"))
    for is_judge, number in ((True, count - count // 2), (False, count // 2)):
        places = [
            (path, change)
            for path in paths
            if str(path.relative_to(ROOT)).startswith(JUDGE) == is_judge
            for change in changes(path.read_text("utf-8"))
        ]
        for path, (start, end, new) in choose.sample(places, number):
            text = path.read_text("utf-8")
            first, last = text.rfind("\n", 0, start) + 1, text.find("\n", end)
            while text.count(text[first:last]) > 1:  # As many lines as make them unique.
                first = text.rfind("\n", 0, first - 1) + 1
            changed = text[first:start] + new + text[end:last]
            name, file = f"drawn {len(mutations) + 1}", str(path.relative_to(ROOT))
            mutations.append(Mutation(name, file, text[first:last], changed))
    return mutations


def changes(text: str) -> Iterator[tuple[int, int, str]]:
    """Yields start, end and new text of every change that can be made in a module."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))

    def place(node: ast.stmt | ast.expr) -> tuple[int, int]:
        ends = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
        start, end = (text.encode()[: starts[n - 1] + column] for n, column in ends)
        return len(start.decode()), len(end.decode())

    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    last = {function.body[-1] for function in functions}
    for node in _nodes(tree):
        if _acts(node) or (isinstance(node, ast.Return) and node not in last):
            yield *place(node), "pass"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield *place(node), str(node.value + 1)
        elif isinstance(node, ast.Compare):
            for left, right in itertools.pairwise([node.left, *node.comparators]):
                between = place(left)[1], place(right)[0]
                if sign := re.search("[<>]=?", text[slice(*between)]):
                    start, end = (between[0] + offset for offset in sign.span())
                    yield start, end, MOVED[sign[0]]
        for condition in _conditions(node):
            start, end = place(condition)
            yield start, end, f"not ({text[start:end]})"


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes of a tree, but for those of f-strings, whose places are not exact."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.JoinedStr):
            yield node
            yield from _nodes(node)


def _acts(node: ast.AST) -> bool:
    """Whether a node is a statement that changes something, and gives no variable its name."""
    if isinstance(node, ast.Assign):
        return all(isinstance(each, ast.Attribute | ast.Subscript) for each in node.targets)
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return is_call or isinstance(node, ast.AugAssign)


def _conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.comprehension):
        return node.ifs
    return [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert) else []


def copy_with(folder: pathlib.Path, *mutations: Mutation) -> pathlib.Path:
    """Copies the repository, makes changes in the copy, and returns it; it has no `.git`."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    for name in (".venv", ".venv-bench"):
        if (ROOT / name).exists():
            (copy / name).symlink_to((ROOT / name).resolve())
    for mutation in mutations:
        path = copy / mutation.file
        path.write_text(mutation.changed(path.read_text("utf-8")), "utf-8")
    return copy


def _python(copy: pathlib.Path, *words: str) -> tuple[int | None, str]:
    """Runs Python in a copy; returns its exit code, or None if it did not end, and its output."""
    process = subprocess.Popen(
        [sys.executable, *words], cwd=copy, start_new_session=True, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=TIMEOUT_SEC)
        return process.returncode, printed
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # Its child processes end, too.


def _failed(copy: pathlib.Path, *words: str) -> list[str]:
    """Returns the tests that fail in a copy. A run without an end counts as one."""
    code, printed = _python(copy, *PYTEST, "--tb=no", "-rfE", f"--deselect={OF_THE_LIST}", *words)
    failed = re.findall("^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.MULTILINE)
    if not failed and code not in (0, 5):  # 5: all tests were deselected.
        return [f"no end within {TIMEOUT_SEC // 60} minutes" if code is None else f"code {code}"]
    return failed


class Covered(NamedTuple):
    """The seconds that each file of tests takes, and those that run a line of the program."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, list[str]]]

    def tests_of(self, mutation: Mutation) -> list[str]:
        """Returns the tests that run what a bug changes, first those that run most of its file."""
        text, new = (ROOT / mutation.file).read_text("utf-8"), mutation.new.splitlines()
        above = text[: text.index(mutation.old)].count("\n")
        runs = self.lines.get(mutation.file, {})
        changed = [n for n, line in enumerate(mutation.old.splitlines(), 1) if line not in new]
        first, last = above + (changed or [1])[0], above + (changed or [1])[-1]
        while first > 1 and not any(runs.get(line) for line in range(first, last + 1)):
            first -= 1  # A line in the midst of a statement: its first one counts.
        found = {name for line in range(first, last + 1) for name in runs.get(line, ())}
        sizes = collections.Counter(itertools.chain.from_iterable(runs.values()))
        return sorted(found, key=lambda name: -sizes[name] / (START_SEC + self.seconds[name]))


def covered(folder: pathlib.Path, marked: list[str]) -> Covered:
    """Runs each file of tests on its own, and returns which lines it runs."""
    copy, seconds = copy_with(folder), dict[str, float]()
    for path in sorted((copy / "tests").rglob("test_*.py")):
        name, start = str(path.relative_to(copy)), time.monotonic()
        words = [f"--source={','.join(PROGRAM)}", f"--context={name}", *PYTEST, *marked, name]
        code, printed = _python(copy, "-m", "coverage", "run", *words)
        check(code in (0, 5), f"{name} fails without a bug: {printed[-1000:]}")  # 5: all are slow.
        seconds[name] = time.monotonic() - start
    _python(copy, "-m", "coverage", "combine", "--quiet")
    data = coverage.CoverageData(copy / ".coverage")
    data.read()
    lines = {
        str(pathlib.Path(path).relative_to(copy)): data.contexts_by_lineno(path)
        for path in data.measured_files()
    }
    return Covered(seconds, lines)


def run(folder, options, counts):
    """Tries the bugs; yields what each one changes, and the test that notices it."""
    mutations = drawn(options.cycles, options.seed) if options.cycles else listed()
    marked = [] if options.all else ["-m", "not slow"]
    runs = covered(folder, marked)
    for mutation in [each for each in mutations if each.name in (options.only or each.name)]:
        copy, tests = copy_with(folder, mutation), runs.tests_of(mutation)
        parts = [part for part in (tests[:1], tests[1:4], tests[4:]) if part]
        failed = next(filter(None, (_failed(copy, "-x", *marked, *part) for part in parts)), [])
        for place in ["", " in the judge"] if mutation.file.startswith(JUDGE) else [""]:
            counts[f"bugs{place}"] += 1
            counts[f"noticed{place}"] += bool(failed)
        old, new = (" ".join(each.split()) for each in (mutation.old, mutation.new))
        told = failed[0] if failed else "NO TEST"
        yield f"{mutation.name}: {mutation.file}: `{old}` → `{new}`: {told}"
    check(counts["noticed"] >= 0.95 * counts["bugs"], "too few bugs are noticed")
