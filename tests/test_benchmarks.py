"""Tests the comparison with other programs: requests, and the evaluation of answers."""

import json
import subprocess
import sys

import pytest

from app.training.recipes import RECIPES
from conftest import ROOT
from strategies.tf_private import learning_rate_schedule

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


MEASURED = """
import run
def of(secs, peer="", precision="float32", **more):
    return {"peer": peer, "precision": precision, "secs": [secs] * 3, **more}
programs = {
    "manual × 2": of(1e-3),
    "manual × 2, bfloat16": of(5e-4, precision="bfloat16"),
    "JAX × 1": of(2e-3, "JAX", settings="channels last"),
    "JAX × 2": of(4e-3, "JAX"),
    "JAX × 1, bfloat16": of(3e-3, "JAX", "bfloat16"),
}
part = {"title": "Networks", "model": "LeNet", "programs": programs,
        "ratios": [["manual × 2, bfloat16", "manual × 2"]]}
results = {"date": "2026-01-01", "processor": "P", "cores": 2, "versions": {"jax": "1"},
           "parts": {"lenet": part}}
"""


def test_the_page_is_made_of_measurements_alone():
    said = in_benchmarks(f"{MEASURED}\nprint(run.render(results))")
    assert "| manual × 2 | 1,000.0 | 1,000.0–1,000.0 |" in said
    assert "| LeNet | manual × 2, bfloat16 | manual × 2 | 0.500 | 0.500–0.500 |" in said


def test_the_summary_has_each_peer_at_its_best():
    said = in_benchmarks(f"{MEASURED}\nprint(*run.summary(results), sep='\\n')")
    assert said.splitlines()[2:] == [
        "| LeNet | manual × 2 | JAX × 1 | 0.500 | 0.500–0.500 |",
        "| LeNet | manual × 2, bfloat16 | JAX × 1 | 0.250 | 0.250–0.250 |",
        "| LeNet | manual × 2, bfloat16 | manual × 2 | 0.500 | 0.500–0.500 |",
    ]


def test_the_page_shows_the_accuracy_of_the_programs_that_were_tested():
    said = in_benchmarks(
        """
import run
programs = {"manual × 2": {"peer": "", "precision": "float32", "secs": [1e-4, 3e-4, 1e-4],
                           "images": [60000] * 3, "accuracy": 0.8727}}
part = {"title": "Split", "model": "LeNet", "programs": programs, "ratios": []}
results = {"date": "2026-01-01", "processor": "P", "cores": 2, "versions": {},
           "parts": {"lenet_split": part}}
print(run.render(results))
"""
    )
    assert "| sec/epoch | accuracy |\n| --- | --- | --- | --- | --- |" in said
    assert "| 6.00 | 0.8727 |" in said


RECORDING = """
import pathlib, sys; sys.path.insert(0, sys.argv[1])
import protocol
protocol.claim_stdout()

def note(name, answer):
    with open(sys.argv[2], "a") as file:
        print(name, file=file)
    return answer

protocol.serve({}, {
    "steps": lambda num_steps: note(f"steps {num_steps}", {"sec": 1.0, "images": 4}),
    "evaluate": lambda: note("evaluate", {"accuracy": 0.5}),
})
"""


@pytest.mark.parametrize(("test_first_block", "num_tests"), [(True, 1), (False, 0)])
def test_accuracy_is_asked_once_after_the_first_block(tmp_path, test_first_block, num_tests):
    (tmp_path / "recording.py").write_text(RECORDING)
    said = in_benchmarks(
        f"""
import pathlib, json, programs, run
programs.FOLDER = pathlib.Path({str(tmp_path)!r})
program = programs.Program("p", "recording.py", ({str(BENCHMARKS)!r}, {str(tmp_path / "asked")!r}))
part = run.Part("title", "model", 7, [program], [], {test_first_block})
found = run.measure(part, rounds=3, data_dir="x")
print(json.dumps(found["p"]))
"""
    )
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["steps 7", *["evaluate"] * num_tests, "steps 7", "steps 7"]
    result = json.loads(said.splitlines()[-1])
    assert result["secs"] == [0.25] * 3 and result.get("accuracy") == (0.5 if num_tests else None)


def test_split_programs_train_with_the_same_batch_recipe_and_number_of_devices():
    programs = json.loads(
        in_benchmarks(
            "import json, bench_parts; programs = bench_parts.split_part('peers').programs\n"
            "print(json.dumps([[p.name, p.file, p.flags] for p in programs]))"
        )
    )
    assert {file for _, file, _ in programs} == {
        "lockstep.py", "torch_ddp.py", "torch_pipeline.py", "torch_fsdp.py"
    }  # fmt: skip
    for name, file, flags in programs:
        assert (BENCHMARKS / file).exists(), name
        assert {
            "--model=lenet", "--global_batch_size=256", "--recipe=fast", "--num_devices=2"
        } <= set(flags), name  # fmt: skip


@pytest.mark.parametrize("part", ["lenet", "resnet18", "lenet_keras", "lenet_split"])
def test_lockstep_as_a_program_takes_the_flags_of_every_part(part):
    found = json.loads(
        in_benchmarks(
            "import json, lockstep, bench_parts\n"
            f"programs = bench_parts.all_parts()[{part!r}].programs\n"
            "programs = [p for p in programs if p.file == 'lockstep.py']\n"
            "configs = [lockstep.parse_config([*p.flags, '--data_dir=x']) for p in programs]\n"
            "names = [config.distribution.strategy for config in configs]\n"
            "print(json.dumps([(p.flags, name) for p, name in zip(programs, names)]))"
        )
    )
    assert found
    for flags, strategy in found:
        given = [flag for flag in flags if flag.startswith("--strategy=")]
        assert given in ([f"--strategy={strategy}"], []), flags


@pytest.mark.parametrize("num_steps", [2, 40, 235, 2350])
@pytest.mark.parametrize("global_batch_size", [256, 64, 1024])
def test_the_peers_recipe_is_the_projects(num_steps, global_batch_size):
    recipe = RECIPES["fast"]["lenet"]
    peer = json.loads(
        in_benchmarks(
            f"""
import dataclasses, json, protocol
from peer_recipe import PEER_RECIPES
recipe = PEER_RECIPES["fast"]
rates = recipe.learning_rates(
    protocol.LEARNING_RATES["lenet"], global_batch_size={global_batch_size}, num_steps={num_steps}
)
print(json.dumps({{**dataclasses.asdict(recipe), "rates": rates}}))
"""
        )
    )
    peak = recipe.learning_rate(global_batch_size=global_batch_size, num_steps=num_steps)
    schedule = learning_rate_schedule(recipe.create_optimizer(peak, num_steps))
    rates = peer.pop("rates")
    assert peer == {name: getattr(recipe, name) for name in peer}
    assert not recipe.flip and not recipe.label_smoothing  # The programs have neither.
    # Keras computes in float32.
    assert rates == pytest.approx([float(schedule(i)) for i in range(num_steps)], abs=1e-7)


@pytest.mark.parametrize(
    ("program", "flags", "error"),
    [
        ("torch_pipeline.py", ["--num_devices=4"], "--num_devices=4 must be 2 or 3"),
        ("torch_pipeline.py", ["--micro_batches=1"], "--micro_batches=1: PyTorch's 1F1B requires"),
        ("torch_pipeline.py", ["--micro_batches=3"], "must be a multiple of --micro_batches=3"),
        ("torch_pipeline.py", ["--micro_batches=0"], "--micro_batches=0 must be at least 1"),
        ("torch_fsdp.py", ["--num_devices=1"], "--num_devices=1 must be at least 2 to shard"),
        ("torch_ddp.py", ["--num_devices=0"], "--num_devices=0 must be at least 1"),
        ("torch_ddp.py", ["--model=resnet18", "--recipe=fast"], "--recipe=fast: not available"),
        ("jax_devices.py", ["--recipe=fast"], "unrecognized arguments: --recipe=fast"),
    ],
)
def test_wrong_flags_get_one_line_before_a_framework_is_imported(program, flags, error):
    result = subprocess.run(
        [sys.executable, BENCHMARKS / program, "--data_dir=/nowhere", *flags],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert result.returncode == 2 and result.stdout == ""
    assert error in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("num_examples", "num_shards", "sizes"),
    [(100, 4, [32, 32, 32, 4]), (98, 4, [32, 32, 32]), (100, 1, [32, 32, 32, 4])],
)
def test_a_last_batch_that_is_not_cut_into_equal_shards_is_dropped(num_examples, num_shards, sizes):
    said = in_benchmarks(
        f"""
import json, numpy as np, protocol
zeros = np.zeros({num_examples}, np.uint8)
job = protocol.BenchmarkJob(
    "lenet", 32, 2, protocol.FashionMnist(zeros, zeros, zeros, zeros), {num_shards}, {{}}
)
batches = job.index_batches()
sizes = [len(next(batches)) for _ in range({len(sizes)} + 1)]
print(json.dumps([sizes, protocol.describe(job, "")["images_per_epoch"]]))
"""
    )
    assert json.loads(said) == [[*sizes, 32], sum(sizes)]


def test_missing_data_gets_one_line():
    result = subprocess.run(
        [sys.executable, BENCHMARKS / "run.py"], capture_output=True, text=True, env={}, check=False
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: --data_dir is missing")


def test_no_rounds_are_refused():
    said = in_benchmarks(
        """
import run, sys
sys.stderr = sys.stdout
try:
    run.main(["--rounds=0", "--data_dir=x"])
except SystemExit as stop:
    print(stop.code)
"""
    )
    assert "--rounds=0 must be at least 1" in said and said.splitlines()[-1] == "2"


PRETENDED = """
import pathlib, run

def measure(part, *, rounds, data_dir):
    sample = {"secs": [0.1, 0.2], "images": [1, 1], "versions": {"numpy": "2"}}
    tested = {"accuracy": 0.87} if part.tests_first_block else {}
    return {p.name: {**sample, **tested, "peer": p.peer, "precision": p.precision}
            for p in part.programs}

run.measure = measure
"""


def test_a_full_run_writes_the_page(tmp_path):
    page = tmp_path / "BENCHMARKS.md"
    page.write_text("earlier")
    flags = ["--data_dir=x", f"--out={tmp_path}/out", f"--output={page}"]
    printed = in_benchmarks(f"{PRETENDED}\nrun.main({flags!r})")
    assert page.read_text() == (tmp_path / "out" / "bench.md").read_text()
    assert page.read_text().startswith("# Benchmarks")
    assert printed.endswith(f"saved {page}\n")
    assert {path.name for path in tmp_path.iterdir()} == {
        "BENCHMARKS.md", "benchmarks.png", "benchmarks.svg", "out",
    }  # fmt: skip
    assert (tmp_path / "benchmarks.png").stat().st_size > 10_000


def test_a_run_of_one_part_writes_the_page_once_the_others_are_there(tmp_path):
    page = tmp_path / "BENCHMARKS.md"
    flags = ["--data_dir=x", f"--out={tmp_path}/out", f"--output={page}"]
    printed = in_benchmarks(f"{PRETENDED}\nrun.main({[*flags, '--only=lenet']!r})")
    assert not page.exists() and "lenet_keras" in printed.splitlines()[-1]
    in_benchmarks(f"{PRETENDED}\nrun.main({flags!r})")
    page.unlink()
    in_benchmarks(f"{PRETENDED}\nrun.main({[*flags, '--only=resnet18']!r})")
    assert page.exists()
