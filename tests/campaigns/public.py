"""Runs the public cases: programs after reports of others, each right and with its mistakes.

A case is a file of `tests/verifier/zoo/public`. Its right form and each wrong one are variants of
`lockstep run`, whose trainings run in processes that have imported the framework. The cases of
`sealed.txt` are left out without `--all`: they were written with the others, and first run when
nothing was changed any more. Fails if a right program has a fault, or a wrong one has none.
"""

import ast
import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lockstep import trainings
from lockstep.answer.verdict import BY_DESIGN, CLEAN, Verdict
from lockstep.data.file import TraceError
from lockstep.launch import TrainingError

from . import Options, check
from .scripts import AT_ONCE, ROOT, Server, shown

CASES = ROOT / "tests" / "verifier" / "zoo" / "public"
SEALED = CASES / "sealed.txt"
# Framework of a case → key of `PRELOADED`.
FRAMEWORKS = {"torch": "torch", "jax": "jax", "keras": "keras", "keras-jax": "jax"}
RIGHT = "right"  # Name of the variant without a mistake.
REFUSED = "refused"


class Case(NamedTuple):
    """A program after a public report.

    Attributes:
        name: kind and file, as in "losses/one_micro_batch".
        told: what the report says.
        reference: where it was reported.
        date: year and month of the report.
        framework: a key of `FRAMEWORKS`.
        wrong: name of each mistake → details of findings that name it.
        processes: ranks, or devices of a program of JAX or TensorFlow.
        steps: number of first steps to record.
        right: status of the verdict on the right program.
        modules: whether the modules of a PyTorch model are recorded.
        note: a sentence.
        resume: whether the program saves a checkpoint, and resumes from it in a second run.
        save_processes: ranks of the first of these runs; 0 for as many as of the second.
    """

    name: str
    told: str
    reference: str
    date: str
    framework: str
    wrong: Mapping[str, list[str]]
    processes: int = 2
    steps: int = 2
    right: str = CLEAN
    modules: bool = False
    note: str = ""
    resume: bool = False
    save_processes: int = 0

    @property
    def path(self) -> pathlib.Path:
        """The file."""
        return CASES / f"{self.name}.py"


class Outcome(NamedTuple):
    """What the verdict on a variant says.

    Attributes:
        status: of the verdict; "refused" if there is none.
        details: those of its faults, in the order of the verdict.
        text: the findings, or why there is no verdict.
        designs: details of what is by design.
    """

    status: str
    details: tuple[str, ...]
    text: str
    designs: tuple[str, ...] = ()


def listed() -> list[Case]:
    """Returns all cases, in the order of their names."""
    return [_read(path) for path in sorted(CASES.glob("*/*.py"))]


def sealed() -> set[str]:
    """Returns the names of the cases that are first run at the end."""
    return set(SEALED.read_text("utf-8").split()) if SEALED.exists() else set()


def _read(path: pathlib.Path) -> Case:
    told, _, table = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n\n")
    name = f"{path.parent.name}/{path.stem}"
    return Case(name, told.replace("\n", " "), **tomllib.loads(table))


class Servers:
    """Processes that have imported a framework, as many for each as programs run at once."""

    def __init__(self) -> None:
        self._free: dict[str, queue.SimpleQueue[Server]] = {}
        self._started: list[Server] = []
        self._lock = threading.Lock()

    def run(
        self, training: Any, variables: Mapping[str, str], log: pathlib.Path, timeout_sec: float,
        on_wait: Any = None,
    ) -> None:  # fmt: skip
        """Runs a training in place of `lockstep.launch.run_training`.

        Args:
            training: "python", a framework, a file, a mistake, a number of processes, and of a
                training that resumes "SAVE" or "LOAD" and the name of its checkpoint.
            variables: environment variables.
            log: file for what the training prints.
            timeout_sec: time limit.
            on_wait: unused.

        Raises:
            TrainingError: the training failed or reached its time limit.
        """
        _, framework, program, mistake, processes, *checkpoint = training
        environment = {**variables, "BUG": mistake, "DEVICES": processes, "OMP_NUM_THREADS": "1"}
        if checkpoint:
            environment[checkpoint[0]] = str(log.parent / checkpoint[1])
        free = self._of(FRAMEWORKS[framework])
        server = free.get()
        try:
            server.process.stdin.write(json.dumps({
                "program": program, "arguments": [], "folder": str(log.parent), "log": str(log),
                "environment": environment, "timeout_sec": timeout_sec,
                "processes": int(processes) if framework == "torch" else 1,
            }) + "\n")  # fmt: skip
            server.process.stdin.flush()
            code = int(server.process.stdout.readline())
        finally:
            free.put(server)
        if code:
            tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-15:])
            raise TrainingError(f"ended with exit code {code}", tail, has_ended=True)

    def _of(self, framework: str) -> "queue.SimpleQueue[Server]":
        with self._lock:
            if framework not in self._free:
                self._free[framework] = queue.SimpleQueue()
                for _ in range(AT_ONCE):
                    self._started.append(
                        Server("keras" if framework == "tensorflow" else framework)
                    )
                    self._free[framework].put(self._started[-1])
        return self._free[framework]

    def end(self) -> None:
        """Ends all processes."""
        for server in self._started:
            server.process.kill()
            server.process.wait()


def outcomes(case: Case, keep: pathlib.Path | None = None, wanted: str = "") -> dict[str, Outcome]:
    """Runs the variants of a case; name of the variant → what its verdict says.

    A training that cannot be recorded ends a whole command: each variant is then run on its own.

    Args:
        case: the case.
        keep: folder for the recordings.
        wanted: the only variant to run; all if empty.
    """

    def command(mistake: str, processes: int, *checkpoint: str) -> list[str]:
        return ["python", case.framework, str(case.path), mistake, str(processes), *checkpoint]

    names = [name for name in (RIGHT, *case.wrong) if wanted in ("", name)]
    variants: dict[str, Any] = {}
    resumes: dict[str, Any] = {}
    for number, name in enumerate(names):
        own, file = "" if name == RIGHT else name, f"checkpoint{number}"
        if case.resume:
            first = command(own, case.save_processes or case.processes, "SAVE", file)
            resumes[name] = first, command(own, case.processes, "LOAD", file)
        else:
            variants[name] = command(own, case.processes)
    settings = trainings.Settings(case.steps, modules=case.modules, timeout_sec=120, keep=keep)
    found = {}
    try:
        verdicts = trainings.verify_trainings(command("", 1), variants, settings, resumes)
        found = {name: _outcome(verdict) for name, verdict in verdicts.items()}
    except (TrainingError, TraceError, ValueError) as error:
        if len(names) == 1:
            return {names[0]: Outcome(REFUSED, (), str(error))}
        for name in names:
            found |= outcomes(case, keep, name)
    except Exception as error:  # A bug of the comparison.
        return {name: Outcome(REFUSED, (), f"{type(error).__name__}: {error}") for name in names}
    return found


def _outcome(verdict: Verdict) -> Outcome:
    details = tuple(finding.detail for finding in verdict.faults)
    designs = tuple(each.detail for each in verdict.findings if each.status == BY_DESIGN)
    return Outcome(verdict.status, details, "\n    ".join(map(shown, verdict.findings)), designs)


def judged(case: Case, name: str, outcome: Outcome) -> str:
    """Says in a word what a verdict is worth."""
    if name == RIGHT:
        if outcome.details:
            return "accused"
        return outcome.status
    if outcome.details:
        return "named" if outcome.details[0] in case.wrong[name] else "caught"
    if {*outcome.designs} & {*case.wrong[name]} or outcome.status in case.wrong[name]:
        return f"named, {outcome.status}"
    return "passed" if outcome.status in (CLEAN, BY_DESIGN) else outcome.status


@contextlib.contextmanager
def running_servers() -> Iterator[None]:
    """Runs the trainings of `lockstep run` in processes that have imported the framework."""
    servers, run_training = Servers(), trainings.run_training
    trainings.run_training = servers.run
    try:
        yield
    finally:
        trainings.run_training = run_training
        servers.end()


def run(folder: pathlib.Path, options: Options, counts: collections.Counter) -> Iterator[str]:
    """Runs the cases, two at a time; yields what is found of each.

    `LOCKSTEP_PUBLIC_KEEP` is a folder for the recordings, `LOCKSTEP_PUBLIC_PAGE` a file for the
    page with all results.
    """
    closed = set() if options.all else sealed()
    cases = [case for case in listed() if case.name not in closed]
    cases = [case for case in cases if options.wants(case.name.replace("_", " "))]
    kept = os.environ.get("LOCKSTEP_PUBLIC_KEEP")
    folders = [pathlib.Path(kept) / case.name if kept else None for case in cases]
    rows = []
    with running_servers(), concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for case, found in zip(cases, pool.map(outcomes, cases, folders), strict=True):
            for name, outcome in found.items():
                rows.append(Row(case, name, outcome, judged(case, name, outcome)))
                yield rows[-1].told
    for row in rows:
        counts[f"{row.which} {row.word}"] += 1
    for title, part in parts(rows).items():
        yield f"{title}\n" + "\n".join(" ".join(line) for line in table(part))
    if path := os.environ.get("LOCKSTEP_PUBLIC_PAGE"):
        pathlib.Path(path).write_text(page(rows), "utf-8")
    check(not counts["right accused"], "a right program has a fault")
    check(not counts["wrong passed"], "a wrong program has no fault")


class Row(NamedTuple):
    """A variant of a case with its outcome, in a word, too."""

    case: Case
    name: str
    outcome: Outcome
    word: str

    @property
    def which(self) -> str:
        """ "right" or "wrong"."""
        return RIGHT if self.name == RIGHT else "wrong"

    @property
    def kind(self) -> str:
        """The kind of the case."""
        return self.case.name.partition("/")[0]

    @property
    def told(self) -> str:
        """The row in lines of text."""
        right = self.case.right if self.name == RIGHT else ", ".join(self.case.wrong[self.name])
        text = f"{self.case.name}: {self.name}: {self.word} (right: {right})"
        return f"{text}\n    {self.outcome.text}".rstrip()


def parts(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the rows of the cases that were not sealed, and of those that were, by titles."""
    closed = sealed()
    found = {
        "Cases that were known while the verifier was changed": [
            row for row in rows if row.case.name not in closed
        ],
        "Sealed cases: first run when nothing was changed any more": [
            row for row in rows if row.case.name in closed
        ],
    }
    return {title: part for title, part in found.items() if part}


def table(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yields a line of counts for each kind, and one for all."""
    for kind in (*dict.fromkeys(row.kind for row in rows), "all"):
        own = [row for row in rows if kind in (row.kind, "all")]
        line = [kind, f"{len({row.case.name for row in own})} cases"]
        for which in (RIGHT, "wrong"):
            words = collections.Counter(row.word for row in own if row.which == which)
            told = ", ".join(f"{n} {word}" for word, n in sorted(words.items()))
            line.append(f"{which}: {words.total()}: {told}")
        yield line


def page(rows: Sequence[Row]) -> str:
    """Returns a page in Markdown with the result of each case."""
    lines = [PREAMBLE]
    for title, part in parts(rows).items():
        lines += [f"## {title}", "", "| Kind | Cases | Right programs | Wrong programs |"]
        lines.append("| --- | --- | --- | --- |")
        for kind, number, right, wrong in table(part):
            cells = kind, number.split()[0], *(x.partition(": ")[2] for x in (right, wrong))
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", "| Case | Report | Right program | Wrong programs |"]
        lines.append("| --- | --- | --- | --- |")
        for case in dict.fromkeys(case.name for case in (row.case for row in part)):
            own = [row for row in part if row.case.name == case]
            lines.append(f"| {' | '.join(_cells(own))} |")
        lines.append("")
    return "\n".join(lines)


PREAMBLE = """# Public cases

Small programs after mistakes that others reported, written in our own words before the verifier was
run on any of them: each a right program, and the same with one to three mistakes. `make campaign
ARGS="public --all"` runs them by `lockstep run` and writes this page. Some were sealed until
nothing was changed any more; those of an earlier time are known by now.
*named*: the first fault has a detail that was written down as right beforehand;
*named, by design*: it says so, and that both are right trainings; *caught*: there is a fault of
another name; *not compared*: exit code 3, which says what is missing;
*passed*: exit code 0; *accused*: a right program with a fault; *refused*: no verdict.

The sealed cases say what the verifier does with programs that it does not know. The others were
used to change it, and some of their lists of right names were extended afterwards.
"""


def _cells(rows: Sequence[Row]) -> Iterator[str]:
    case = rows[0].case
    yield case.name
    yield f"{case.reference} ({case.date}): {case.told}".replace("|", "\\|")
    yield "; ".join(row.word for row in rows if row.which == RIGHT)
    yield "; ".join(
        f"{row.name}: {row.word}" + (f" ({row.outcome.details[0]})" if row.outcome.details else "")
        for row in rows
        if row.which != RIGHT
    )
