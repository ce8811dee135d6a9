"""The programs that are compared, each in a process of its own that is told what to do in turn."""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).parent
_GRACE_SEC = 10


@dataclasses.dataclass(frozen=True)
class Program:
    """One training in one framework.

    Attributes:
        name: in tables.
        file: in this folder.
        flags: besides `--data_dir`.
        python: the interpreter of its environment.
        peer: whose framework it is, "" for this project.
        precision: "float32" or "bfloat16": what the layers compute in.
    """

    name: str
    file: str
    flags: tuple[str, ...]
    python: str = sys.executable
    peer: str = ""
    precision: str = "float32"


class Running(contextlib.AbstractContextManager):
    """A program that has been started; leaving the context ends it and what it has started.

    Args:
        program: what to start.
        data_dir: folder with the four files of Fashion-MNIST.
    """

    def __init__(self, program: Program, data_dir: str):
        self.program = program
        # Not a pipe, which nobody would read until the end; closed by `__exit__`.
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [program.python, FOLDER / program.file, *program.flags, f"--data_dir={data_dir}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,  # One group, to be ended as a whole.
        )

    def wait_until_ready(self) -> dict:
        """Returns what the program says of itself once it is warm."""
        return self._read()

    def ask(self, **request) -> dict:
        """Sends a request and waits for the answer."""
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            last = (self._said.read().strip().splitlines() or ["nothing"])[-1]
            sys.exit(f"error: {self.program.name} ended before it answered; it said last: {last}")
        return json.loads(line)

    def __exit__(self, *exception):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_GRACE_SEC)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        self._said.close()
