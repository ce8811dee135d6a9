"""The comparison with other programs: what is asked of them, and what is made of the answers."""

import subprocess
import sys

from conftest import ROOT

BENCHMARKS = ROOT / "benchmarks"
ECHO = """
import sys; sys.path.insert(0, sys.argv.pop(1))
from protocol import claim_stdout, serve
claim_stdout()
print("not an answer")
serve({"versions": {}}, {"steps": lambda num_steps: {"sec": 1.0, "images": num_steps}})
"""


def in_benchmarks(code):
    """Runs code as the programs are run, from their own folder."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n{code}"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip


def test_a_program_is_asked_and_answers_and_ends(tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    said = in_benchmarks(
        f"""
import programs
from programs import Program, Running
programs.FOLDER = __import__("pathlib").Path({str(tmp_path)!r})
with Running(Program("echo", "echo.py", ({str(BENCHMARKS)!r},)), "nowhere") as running:
    print(running.wait_until_ready(), running.ask(do="steps", num_steps=3))
print(running._process.returncode)
"""
    )
    assert said == "{'ready': True, 'versions': {}} {'sec': 1.0, 'images': 3}\n0\n"


def test_the_page_is_made_of_measurements_alone():
    said = in_benchmarks(
        """
import run
programs = {
    "manual × 2": {"secs": [1e-3] * 3, "flops_per_example": 1e6},
    "JAX × 2": {"secs": [2e-3] * 3},
    "peak, float32": {"secs": [5e-10] * 3},
}
ratios = [{"text": "", "program": "manual × 2", "base": "JAX × 2"}]
results = {"date": "2026-01-01", "processor": "P", "cores": 2, "versions": {"jax": "1"},
           "lenet": {"programs": programs, "ratios": ratios}}
print(run.render(results))
"""
    )
    assert "| manual × 2 | 1,000.0 | 1,000.0–1,000.0 | 0.50 (0.50–0.50) |" in said
    assert "| manual × 2 | JAX × 2 | 0.500 | 0.500–0.500 |" in said
    assert "matrix products at 2 GFLOP/s" in said


def test_missing_data_gets_one_line():
    result = subprocess.run(
        [sys.executable, BENCHMARKS / "run.py"], capture_output=True, text=True, env={}, check=False
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: --data_dir is missing")
