"""Runs the programs of the data set, and keeps what each run has recorded.

A run is known by a hash of the program and of all that it is given. One that is kept is not run
again: that is how recordings are judged again in minutes.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .heads import FOLDER, Case

ROOT = FOLDER.parent
AT_ONCE = os.cpu_count() or 2
NO_ANSWER = 125  # Exit code of a program whose server has ended, or does not answer.
RETRIED = {-6: "aborted in native code", -11: "crashed in native code", 124: "did not end",
           NO_ANSWER: "ended its server"}  # fmt: skip
LEAST_FREE = 2**16  # Bytes that are free on a disk that is not full.
START_SEC, GRACE_SEC = 180, 30
# Framework of a case → modules that a server imports, and the interpreter that has the first one.
PRELOADED = {
    "torch": ("torch", "numpy", "torch.distributed.fsdp", "torch._dynamo", "torch.optim.swa_utils",
              "torch.distributed.pipelining", "torch.distributed.tensor.parallel",
              "lockstep.record_torch"),
    "jax": ("jax", "jax.numpy", "lockstep.record_jax"),
    "keras": ("tensorflow", "keras", "lockstep.record_keras"),
}  # fmt: skip


class FailedRunError(Exception):
    """A program failed, or reached its time limit; `tail` is the end of what it printed."""

    def __init__(self, text: str, tail: str) -> None:
        super().__init__(f"{text}\n{tail}")
        self.text, self.tail = text, tail


class CannotRunError(Exception):
    """Programs cannot be run here at all: no interpreter, no space on the disk, nothing kept."""

    def __init__(self, text: str, code: int = 3) -> None:
        super().__init__(text)
        self.code = code


def server_kind(framework: str) -> str:
    """Returns the key of `PRELOADED` of a framework: "keras-jax" is Keras on JAX."""
    return "jax" if framework == "keras-jax" else framework


def _read_end(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns how a run in a folder ended; None if it did not, or its recording is damaged."""
    try:
        end = json.loads((folder / "end.json").read_text("utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in end["sizes"]}
        return end if sizes == end["sizes"] else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def python_of(framework: str) -> str:
    """Returns the interpreter for a framework: `CASES_TORCH_PYTHON` or the like, this one if it
    has the framework, else that of `make frameworks`."""
    package = PRELOADED[server_kind(framework)][0]
    found = [os.environ.get(f"CASES_{server_kind(framework).upper()}_PYTHON")]
    found += [sys.executable] if importlib.util.find_spec(package) else []
    return next(filter(None, [*found, str(ROOT / ".venv-bench" / "bin" / "python")]))


def missing_packages(case: Case) -> list[str]:
    """Returns the packages that a case requires and its interpreter does not have."""
    if not (packages := case.head.get("requires", [])):
        return []
    code = (
        "import sys, importlib.util as u; print(*(p for p in sys.argv[1:] if not u.find_spec(p)))"
    )
    command = [python_of(case.head["framework"]), "-c", code, *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotRunError(f"{command[0]} does not run: {error}") from None
    return done.stdout.split()


class Server:
    """A process that has imported a framework, and runs one program after another.

    Args:
        python: its interpreter.
        modules: what it imports first.
        paths: further folders of modules.
    """

    def __init__(self, python: str, modules: Sequence[str], paths: Sequence[str] = ()) -> None:
        given = {"PYTHONPATH": os.pathsep.join([str(ROOT), *paths])}
        given |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (until the server ends)
        try:
            self.process = subprocess.Popen(
                [python, "-m", "cases.serve", *modules], env={**os.environ, **given}, cwd=ROOT,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            )  # fmt: skip
        except OSError as error:
            raise CannotRunError(f"{python}: {error.strerror}; run `make frameworks`") from None
        self._cannot_import = f"{python} cannot import {modules[0]}"
        self._is_ready = False

    def run(self, request: Mapping[str, Any]) -> int | None:
        """Runs a program; returns its exit code, or None if this server has to be replaced.

        Raises:
            CannotRunError: the interpreter cannot import the modules.
        """
        if not self._is_ready and self._answer(START_SEC) != "ready":
            self.end()
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            raise CannotRunError(f"{self._cannot_import}: {lines[-1] if lines else 'it ended'};"
                                 " run `make frameworks`")  # fmt: skip
        self._is_ready = True
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self._answer(request["timeout_sec"] + GRACE_SEC)
        return int(answer) if answer else None

    def _answer(self, timeout_sec: float) -> str:
        """Returns the next line, or "" if none comes in time or the server has ended."""
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_sec)
        return self.process.stdout.readline().strip() if readable else ""

    def end(self) -> None:
        """Ends the server, and the program that it runs."""
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Runner:
    """Runs programs; each thread that runs some has a server for each framework.

    Args:
        keep: folder for recordings.
        kept_only: whether a run that is not kept is an error.
        timeout_sec: time limit of each run.
        say: prints a line.
    """

    def __init__(
        self, keep: pathlib.Path, *, kept_only: bool = False, timeout_sec: float = 60,
        say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        self.timeout_sec, self._say = timeout_sec, say
        self._keep, self._kept_only = keep.absolute(), kept_only
        self._keys: dict[str, str] = {}  # Path that a recording was asked for → its key.
        self._of_thread = threading.local()  # Kind of server → the one of a thread.
        self._servers: list[Server] = []
        self._has_ended, self._lock = False, threading.Lock()
        try:
            self._keep.mkdir(parents=True, exist_ok=True)
            self._locked = open(self._keep / ".lock", "a")  # noqa: SIM115 (until the runner ends)
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotRunError(f"{keep} is used by another run") from None
        except OSError as error:
            raise CannotRunError(f"{keep}: {error.strerror}") from None

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends all servers, and the programs that they run; nothing is run afterwards."""
        with self._lock:
            self._has_ended = True
        while self._servers:
            self._servers.pop().end()
        self._locked.close()

    def trainings_of(self, case: Case, name: str) -> list[list[str]]:
        """Returns the reference of a form, and the form itself: two runs if it resumes.

        Each has the shape of a command, whose second word is what `run` needs to know.
        """
        head, table = case.head, case.variants[name]
        bug = name if name in case.wrong and "patch" not in table else ""
        number = table.get("processes", head["processes"])
        own = {
            "case": case.id, "framework": head["framework"], "source": case.source(name),
            "bug": bug, "processes": number, "arguments": table.get("arguments", []),
            "launched": head.get("launched", False), "own_weights": False,
        }  # fmt: skip
        alone = {"bug": "", "processes": 1, "source": case.source("right")}
        if table.get("reference") == "patched":
            alone |= {"bug": bug, "source": own["source"]}
        reference = {**own, **alone, "arguments": table.get("original_arguments", [])}
        if "original" in head:
            file = FOLDER / head["original"]
            reference |= {"framework": "torch", "source": file.read_text("utf-8")}
        own["own_weights"] = table.get("own_weights", False)
        first = {**own, "processes": head.get("save_processes", number), "checkpoint": "SAVE"}
        runs = [first, {**own, "checkpoint": "LOAD"}] if head["mode"] == "resume" else [own]
        return [["python", json.dumps(run)] for run in (reference, *runs)]

    def run(
        self, training: Sequence[str], recording: str, options: Mapping[str, Any],
        variables: Callable[[str], Mapping[str, str]], timeout_sec: float,
    ) -> None:  # fmt: skip
        """Runs a training that records itself, or finds its recording kept.

        Args:
            training: what `trainings_of` returns.
            recording: path that the recording is to have; it becomes a link to what is kept.
            options: what the recording depends on; `replay` is the path of an earlier one.
            variables: path that the program is to write → its environment variables.
            timeout_sec: time limit.

        Raises:
            FailedRunError: the program failed or reached its time limit.
            CannotRunError: programs cannot be run at all, or no more.
        """
        run = json.loads(training[1])
        known = {**options, "replay": self._keys.get(options.get("replay", ""), "")}
        tool = known.pop("tool", "")
        key = hashlib.sha256(json.dumps([run, known, tool], sort_keys=True).encode())
        folder = self._keep / run["case"] / key.hexdigest()[:16]
        end = _read_end(folder)
        if self._kept_only and end is None:
            raise CannotRunError(f"{self._keep} has no recording of {run['case']} as it is now,"
                                 " and --kept runs nothing")  # fmt: skip
        if end is None or (end["code"] and not self._kept_only):
            environment = {"BUG": run["bug"], "DEVICES": str(run["processes"])}
            environment |= variables(str(folder / "out.npz"))
            if "checkpoint" in run:
                file = folder.parent / f"{run['bug'] or 'right'}{tool}.saved"
                environment[run["checkpoint"]] = str(file)
            end = self._run_and_keep(folder, run, environment, timeout_sec)
        if end["code"]:
            how = RETRIED.get(end["code"], f"ended with exit code {end['code']}")
            raise FailedRunError(how, end["tail"])
        self._keys[recording] = key.hexdigest()[:16]
        for file in folder.glob("out.*npz"):
            link = pathlib.Path(recording).with_suffix(file.name.removeprefix("out"))
            link.unlink(missing_ok=True)
            link.symlink_to(file)

    def _run_and_keep(
        self, folder: pathlib.Path, run: Mapping[str, Any], environment: Mapping[str, str],
        timeout_sec: float,
    ) -> dict[str, Any]:  # fmt: skip
        """Runs a program in a folder of its own; returns how it ended, which is kept, too."""
        ranks = run["processes"] if run["framework"] == "torch" else 0
        program, log = folder / f"{run['case'].rpartition('/')[2]}.py", folder / "log.txt"
        request = {
            "program": str(program), "arguments": run["arguments"], "folder": str(folder),
            "log": str(log), "environment": environment, "timeout_sec": timeout_sec,
            "processes": ranks if ranks > 1 or run["launched"] else 0,
        }  # fmt: skip
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in (*folder.glob("end.json"), *folder.glob("out.*npz")):
                old.unlink()
            program.write_text(run["source"], "utf-8")
            log.write_bytes(b"")
            code = self._on_server(server_kind(run["framework"]), request)
            text = log.read_text("utf-8", "replace")
            is_full = (
                shutil.disk_usage(folder).free < LEAST_FREE or os.strerror(errno.ENOSPC) in text
            )
            if code and is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sizes = {file.name: file.stat().st_size for file in folder.glob("out.*npz")}
            tail = "\n".join(text.splitlines()[-10:]) if code else ""
            end = {"code": code, "tail": tail, "sizes": sizes}
            part = folder / "end.part"
            part.write_text(json.dumps(end), "utf-8")
            part.replace(folder / "end.json")
        except OSError as error:
            code = 8 if error.errno == errno.ENOSPC else 3
            raise CannotRunError(f"{folder}: {error.strerror}", code) from None
        return end

    def _on_server(self, kind: str, request: Mapping[str, Any]) -> int:
        """Runs a program on this thread's server; a second time after an abort or a hang.

        PyTorch's processes do so now and then, in threads of gloo: fewer than one in a hundred.
        """
        servers: dict[str, Server] = vars(self._of_thread)
        for attempt in range(2):
            with self._lock:
                if self._has_ended:
                    raise CannotRunError("interrupted")
                if kind not in servers:
                    servers[kind] = Server(python_of(kind), PRELOADED[kind])
                    self._servers.append(servers[kind])
            code = servers[kind].run(request)
            if code is None:
                servers.pop(kind).end()
                code = NO_ANSWER
            if code not in RETRIED or attempt or self._has_ended:
                break
            self._say(f"{request['program']}: {RETRIED[code]}, and is run again")
        return code
