"""Scripts that record trainings with other frameworks, or with what stands in for them."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent


def interpreter(framework):
    """Returns an interpreter that has the framework, or ""."""
    own = sys.executable if importlib.util.find_spec(framework) else ""
    return os.environ.get(f"LOCKSTEP_{framework.upper()}_PYTHON") or own


def _frameworks(framework):
    is_missing = pytest.mark.skipif(not interpreter(framework), reason=f"needs {framework}")
    return ["stand-in", pytest.param(framework, marks=[pytest.mark.slow, is_missing])]


WITH_TORCH, WITH_JAX = _frameworks("torch"), _frameworks("jax")


def run_cases(script, framework, *arguments):
    """Runs the script of a framework, or with its stand-in, and asserts that its checks hold."""
    is_real = framework != "stand-in"
    paths = [FOLDER.parents[1], *([] if is_real else [FOLDER / "stand_in"])]
    done = subprocess.run(
        [interpreter(script) if is_real else sys.executable, FOLDER / f"{script}_cases.py",
         *arguments],
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "JAX_PLATFORMS": "cpu",
        },
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done
