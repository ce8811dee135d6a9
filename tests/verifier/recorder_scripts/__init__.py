"""Scripts that record trainings with other frameworks, and the interpreters that have these."""

import os
import pathlib
import subprocess
import sys

import pytest

from cases.runner import PRELOADED, Server

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[2]
INSTALLED = ROOT / ".venv-bench"  # By `make frameworks`.
MODULES = {  # Framework → what its scripts import.
    "torch": (*PRELOADED["torch"], "lockstep.comparison"),
    "jax": ("jax", "jax.numpy", "lockstep.record_jax"),
    "keras": ("keras", "lockstep.record_keras"),
    **{
        name: (name, "lockstep.record_torch")
        for name in ("accelerate", "transformers", "lightning")
    },
}


def interpreter(package):
    """Returns an interpreter that has a package: `LOCKSTEP_…_PYTHON`, or that of `INSTALLED`.

    Keras is installed beside the tests. Returns "" where there is none.
    """
    if package == "keras":
        return sys.executable
    has_package = any(INSTALLED.glob(f"lib/python*/site-packages/{package}"))
    own = str(INSTALLED / "bin" / "python") if has_package else ""
    return os.environ.get(f"LOCKSTEP_{package.upper()}_PYTHON") or own


def needs(package, *more):
    """Returns the mark that skips a test where no interpreter has a package."""
    missing = [name for name in (package, *more) if not interpreter(name)]
    reason = f"needs {' and '.join(missing)}: make frameworks"
    return pytest.mark.skipif(bool(missing), reason=reason)


def run_script(package, *words, cwd=None, timeout=400, **environment):
    """Runs a script, or options of Python, with the interpreter that has a package."""
    given = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [interpreter(package), *map(str, words)], env={**os.environ, **given, **environment},
        cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


class Scripts:
    """Runs scripts in forks of processes that have imported their framework; a context manager."""

    def __init__(self):
        self.servers = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for server in self.servers.values():
            server.end()

    def __call__(self, package, script, *arguments, folder, processes=1, **environment):
        """Runs a script of `FOLDER`, or another one; returns its exit code, and what it printed."""
        if package not in self.servers:
            python, modules = interpreter(package), MODULES[package]
            self.servers[package] = Server(python, modules, [str(FOLDER)])
        log = folder / "printed.txt"
        log.write_bytes(b"")
        code = self.servers[package].run({
            "program": str(FOLDER / script), "arguments": [*map(str, arguments)],
            "folder": str(folder), "environment": environment, "timeout_sec": 200,
            "log": str(log), "processes": processes if processes > 1 else 0,
        })  # fmt: skip
        if code is None:  # The next script gets a new server.
            self.servers.pop(package).end()
        return code, log.read_text("utf-8")
