"""Records every training script of `zoo/scripts` with its bugs, and says what the verifier finds.

Each script runs in one process, which is the reference. Then it runs in two, or as many as its
table says: unchanged, in other forms that are right, and with each bug of the table beside it. Bugs
that are not caught, or not named, are listed and counted. With `--cycles`, as many of the forms and
bugs are drawn at random. Fails if a right program has a fault, or a script cannot run.
"""

import collections
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import pathlib
import queue
import random
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lockstep.answer.text import notes_of
from lockstep.answer.verdict import NOT_COMPARED, NOT_VERIFIED, NOTHING, Finding
from lockstep.comparison import compare_traces
from lockstep.data.file import load

from . import Options, check

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "verifier" / "zoo" / "scripts"
TIMEOUT_SEC = 240
AT_ONCE = os.cpu_count() or 2
DEVICE = os.environ.get("LOCKSTEP_SCRIPTS_DEVICE", "cpu")  # Of PyTorch, such as "cuda".
# PyTorch's processes abort now and then in native code: fewer than one run in a hundred.
CRASHES = "terminated with signal SIGABRT", "terminated with signal SIGSEGV"
UNKNOWN = NOTHING, NOT_COMPARED, NOT_VERIFIED  # Statuses of what was not, or not all, compared.
PRELOADED = {  # Framework → modules that its scripts import.
    "torch": (
        *("numpy", "torch", "torch.distributed.fsdp", "torch._dynamo", "torch.optim.swa_utils"),
        *("torch.distributed.pipelining", "torch.distributed.tensor.parallel"),
        "lockstep.record_torch",
    ),
    "jax": ("jax", "jax.numpy", "lockstep.record_jax"),
    "keras": ("tensorflow", "keras", "lockstep.record_keras"),
}


class Entry(NamedTuple):
    """A script, or a change of it.

    Attributes:
        script: name of the file without suffix.
        name: the change in words.
        changes: pairs of a text that occurs once in the file, and the text that replaces it.
        causes: details of findings that name the bug, or the verdict "nothing to verify"; empty
            if the program is right.
        replay: whether the states of the reference are loaded before each step.
        permuted: whether the tolerance is computed from a recording with permuted examples.
        both: whether the reference has the change, too.
        by_shard: whether the reference is recorded last, for each shard of the other recording.
        processes: number of processes, or of devices in one process, of the other recording.
    """

    script: str
    name: str
    changes: tuple[tuple[str, str], ...] = ()
    causes: tuple[str, ...] = ()
    replay: bool = True
    permuted: bool = False
    both: bool = False
    by_shard: bool = False
    processes: int = 2

    @property
    def source(self) -> str:
        """The text of the script with the changes."""
        text = (SCRIPTS / f"{self.script}.py").read_text("utf-8")
        for old, new in self.changes:
            check(text.count(old) == 1, f"{self}: {text.count(old)} times in the script: {old}")
            text = text.replace(old, new)
        return text.replace('"cpu"', f'"{DEVICE}"')


class Outcome(NamedTuple):
    """What the comparison says of an entry.

    Attributes:
        is_caught: whether there is a fault; of a right program, also in the reference.
        is_named: whether the first fault has one of the details that are right.
        text: the faults, or why there is no verdict.
        has_verdict: whether the recordings could be compared.
    """

    is_caught: bool
    is_named: bool
    text: str
    has_verdict: bool = True


def listed() -> list[Entry]:
    """Returns all entries: of each script the unchanged one, other right forms and bugs.

    `constants` of an entry are statements that run before the program starts.
    """
    entries, begin = [], 'if __name__ == "__main__":'
    for path in sorted(SCRIPTS.glob("*.toml")):
        table = tomllib.loads(path.read_text("utf-8"))
        common = {key: table[key] for key in ("permuted", "by_shard", "processes") if key in table}
        entries.append(Entry(path.stem, "unchanged", **common))
        for found in (*table.get("right", ()), *table["bug"]):
            options = common | found
            changes = options.pop("changes", [])
            if "constants" in options:
                changes = [*changes, (begin, f"{options.pop('constants')}\n\n{begin}")]
            if "old" in options:
                changes = [*changes, (options.pop("old"), options.pop("new"))]
            causes = tuple(options.pop("causes", ()))
            pairs = tuple((old, new) for old, new in changes)
            entries.append(Entry(path.stem, changes=pairs, causes=causes, **options))
    return entries


def python_of(framework: str) -> str:
    """Returns the path of an interpreter that has a framework; it may not exist."""
    found = [os.environ.get(f"LOCKSTEP_{framework.upper()}_PYTHON")]
    found += [sys.executable] if importlib.util.find_spec(framework) else []
    found += [str(ROOT / ".venv-bench" / "bin" / "python")]
    return next(filter(None, found))


class Server:
    """A process that has imported a framework, and runs programs one after another."""

    def __init__(self, framework: str) -> None:
        environment = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, SCRIPTS)))}
        self.process = subprocess.Popen(
            [python_of(framework), str(SCRIPTS / "serve.py"), *PRELOADED[framework]],
            env={**os.environ, **environment, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def run(self, program: pathlib.Path, num_replicas: int, *arguments: str) -> str:
        """Runs a program in its folder; returns "", or the end of what it printed if it failed."""
        assert self.process.stdin and self.process.stdout
        devices = f"--xla_force_host_platform_device_count={num_replicas}"
        request = {
            "program": str(program), "arguments": [str(num_replicas), *arguments],
            "folder": str(program.parent), "environment": {"XLA_FLAGS": devices},
            "timeout_sec": TIMEOUT_SEC,
        }  # fmt: skip
        print(json.dumps(request), file=self.process.stdin, flush=True)
        code = int(self.process.stdout.readline())
        if code == 0:
            return ""
        printed = program.with_suffix(".py.log").read_text("utf-8", "replace")
        return f"exit code {code}\n{printed[-1500:]}"


Servers = dict[str, "queue.SimpleQueue[Server]"]


@contextlib.contextmanager
def running_servers(scripts: Iterable[str]) -> Iterator[Servers]:
    """Starts as many servers for each framework as programs run at once, and ends them."""
    servers: Servers = {}
    started = []
    try:
        for framework in {script.split("_")[0] for script in scripts}:
            servers[framework] = queue.SimpleQueue()
            for _ in range(AT_ONCE):
                started.append(Server(framework))
                servers[framework].put(started[-1])
        yield servers
    finally:
        for server in started:
            server.process.kill()
            server.process.wait()


def record(
    servers: Servers, source: str, script: str, folder: pathlib.Path, num_replicas: int, *files: str
) -> str:
    """Runs a program that records; returns "", or the end of what it printed if it failed."""
    folder.mkdir(exist_ok=True)
    program = folder / f"{script}_{files[0].removesuffix('.npz')}.py"
    program.write_text(source, "utf-8")
    free = servers[script.split("_")[0]]
    server = free.get()
    try:
        failed = server.run(program, num_replicas, *files)
        if any(crash in failed for crash in CRASHES):
            print(f"{program.name}: crashed in native code, and is run again", file=sys.stderr)
            for file in folder.glob("*.rendezvous"):
                file.unlink()
            failed = server.run(program, num_replicas, *files)
        return failed
    finally:
        free.put(server)


def _references(servers: Servers, entry: Entry, folder: pathlib.Path) -> list[pathlib.Path]:
    """Records a program with one replica; returns the recording, and that with other rounding."""
    files = [["one.npz"]]
    if entry.permuted:
        files.append(["permuted.npz", "one.npz", "1"])
    for names in files:
        failed = record(servers, entry.source, entry.script, folder, 1, *names)
        check(not failed, f"{entry.script} with one replica, {names[0]}: {failed}")
    return [folder / names[0] for names in files]


def _outcome(
    servers: Servers, entry: Entry, folder: pathlib.Path, references: list[pathlib.Path]
) -> Outcome:
    """Records a program in several processes and compares it with the reference."""
    if entry.both and not entry.by_shard:
        references = _references(servers, entry, folder)
    one, *permuted = references
    start = [str(one)] if entry.replay and not entry.by_shard else []
    num = entry.processes
    failed = record(servers, entry.source, entry.script, folder, num, "two.npz", *start)
    source = entry.source if entry.both else entry._replace(changes=()).source
    shards = servers, source, entry.script, folder, 1, "by_shard.npz", "two.npz", "", "each"
    if entry.by_shard and not failed:
        one, failed = folder / "by_shard.npz", record(*shards)
    if failed:
        check("/lockstep/record_" in failed, f"{entry.script}: {entry.name}: {failed}")
        return Outcome(False, False, f"refused by the recorder: {failed[-600:].strip()}", False)
    told = []
    try:
        traces = [load(path) for path in (one, folder / "two.npz", *permuted)]
        alone, verdict = compare_traces(traces, {}).values()
        if verdict.status == NOT_COMPARED and "torch" in entry.script and not record(*shards):
            told = [f"{NOT_COMPARED}; with the reference shard by shard:"]
            traces[0] = load(folder / "by_shard.npz")
            alone, verdict = compare_traces(traces[:2], {}).values()
    except Exception as error:  # A recording that cannot be read, or a bug of the comparison.
        return Outcome(False, False, f"no verdict: {type(error).__name__}: {error}", False)
    faults = verdict.faults if entry.causes else [*alone.faults, *verdict.faults]
    told += [f"the reference: {shown(finding)}" for finding in alone.findings]
    told += [shown(finding) for finding in verdict.findings]
    told += [f"note: {note}" for note in notes_of(verdict)]
    told += [verdict.status] if verdict.status in UNKNOWN else []
    named = faults[0].detail if faults else verdict.status
    is_caught = bool(faults) or verdict.status == NOTHING
    return Outcome(is_caught, named in entry.causes, "\n    ".join(told))


def shown(finding: Finding) -> str:
    steps = ", ".join(map(str, finding.steps))
    where = ", ".join([f"steps {steps}", *finding.items, *filter(None, [finding.module])])
    return f"{finding.status}: {finding.stage}/{finding.detail} ({where}): {finding.text}"


def _told(entry: Entry, outcome: Outcome, counts: collections.Counter) -> str:
    """Counts an outcome, and returns it in words."""
    name = f"{entry.script}: {entry.name}"
    if not entry.causes:
        counts["right programs"] += 1
        counts["right programs with a fault"] += outcome.is_caught
        counts["right programs without a verdict"] += not outcome.has_verdict
        told = "FALSE ALARM" if outcome.is_caught else "clean"
    else:
        counts["bugs"] += 1
        counts["bugs caught"] += outcome.is_caught
        counts["bugs named"] += outcome.is_named
        told = "caught, named" if outcome.is_named else "caught, NOT NAMED"
        told = told if outcome.is_caught else "NOT CAUGHT"
        told += "" if outcome.is_named else f" (right: {', '.join(entry.causes)})"
    return f"{name}: {told}\n    {outcome.text}".rstrip()


def run(folder: pathlib.Path, options: Options, counts: collections.Counter) -> Iterator[str]:
    """Runs the entries, two at a time; yields what is found of each."""
    names = {entry: f"{entry.script}/{entry.name}".replace("_", " ") for entry in listed()}
    chosen = [e for e, name in names.items() if options.wants(name)]
    if 0 < options.cycles < len(chosen):
        chosen = random.Random(options.seed).sample(chosen, options.cycles)
    scripts = dict.fromkeys(entry.script for entry in chosen)
    plain = {entry.script: entry for entry in reversed(listed()) if not entry.changes}
    with (
        running_servers(scripts) as servers,
        concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        references = {
            script: pool.submit(_references, servers, plain[script], folder / script)
            for script in scripts
        }
        concurrent.futures.wait(references.values())
        outcomes = [
            pool.submit(
                _outcome, servers, entry, folder / f"{number}", references[entry.script].result()
            )
            for number, entry in enumerate(chosen)
        ]
        for entry, outcome in zip(chosen, outcomes, strict=True):
            yield _told(entry, outcome.result(), counts)
    check(not counts["right programs without a verdict"], "a right program has no verdict")
    check(not counts["right programs with a fault"], "a right program has a fault")
