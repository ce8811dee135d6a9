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


PRETENDED = """
import pathlib, run
sample = {"secs": [0.1, 0.2], "images": [1, 1]}

def measure(programs, *, rounds, num_steps, data_dir):
    return {program.name: dict(sample, versions={"numpy": "2"}) for program in programs}

run.measure = measure
run.time_to_accuracy = lambda *a, **b: {"fast": [{"sec": 4.0, "epochs": 1, "accuracy": 0.87}]}
run.memory_growth = lambda data_dir: {"before_bytes": 1 << 30, "after_bytes": (1 << 30) + 1}
"""


def test_a_full_run_writes_the_page(tmp_path):
    page = tmp_path / "BENCHMARKS.md"
    page.write_text("earlier")
    flags = ["--data_dir=x", f"--out={tmp_path}/out", f"--output={page}"]
    printed = in_benchmarks(f"{PRETENDED}\nrun.main({flags!r})")
    assert page.read_text() == (tmp_path / "out" / "bench.md").read_text()
    assert page.read_text().startswith("# Benchmarks") and "## Memory" in page.read_text()
    assert printed.endswith(f"saved {page}\n")
    assert {path.name for path in tmp_path.iterdir()} == {"BENCHMARKS.md", "out"}


def test_a_run_of_one_part_writes_the_page_once_the_others_are_there(tmp_path):
    page = tmp_path / "BENCHMARKS.md"
    flags = ["--data_dir=x", f"--out={tmp_path}/out", f"--output={page}"]
    printed = in_benchmarks(f"{PRETENDED}\nrun.main({[*flags, '--only=lenet']!r})")
    assert not page.exists() and "lenet_keras" in printed.splitlines()[-1]
    in_benchmarks(f"{PRETENDED}\nrun.main({flags!r})")
    page.unlink()
    in_benchmarks(f"{PRETENDED}\nrun.main({[*flags, '--only=memory']!r})")
    assert page.exists()


def test_make_bench_names_the_page():
    printed = subprocess.run(
        ["make", "--dry-run", "--always-make", "bench"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    ).stdout  # fmt: skip
    assert "benchmarks/run.py --output=docs/BENCHMARKS.md" in printed
