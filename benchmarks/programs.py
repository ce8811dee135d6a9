"""Starts the programs of the benchmark, each in a separate process, and sends them requests."""

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
        name: name in tables.
        file: file name in this folder.
        flags: flags besides `--data_dir`.
        python: interpreter of its environment.
        peer: name of the framework; "" for this project.
        precision: "float32" or "bfloat16", compute dtype of the layers.
    """

    name: str
    file: str
    flags: tuple[str, ...]
    python: str = sys.executable
    peer: str = ""
    precision: str = "float32"


class Running(contextlib.AbstractContextManager):
    """A started program; leaving the context ends it and its child processes.

    Args:
        program: the program.
        data_dir: folder with the four files of Fashion-MNIST.
    """

    def __init__(self, program: Program, data_dir: str):
        self.program = program
        # Not a pipe, which would not be read until the end; closed by `__exit__`.
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [program.python, FOLDER / program.file, *program.flags, f"--data_dir={data_dir}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,  # A process group, ended as a whole.
        )

    def wait_until_ready(self) -> dict:
        """Returns the program's description of itself, after its warm-up."""
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
