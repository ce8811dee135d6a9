"""Tests the comparison with other programs: requests, and the evaluation of answers."""

import dataclasses
import importlib
import subprocess
import sys

import numpy as np
import pytest

from app.training.recipes import RECIPES
from conftest import ROOT
from strategies.tf_private import learning_rate_schedule

BENCHMARKS = ROOT / "benchmarks"
PROGRAM = f"""
import sys; sys.path.insert(0, {str(BENCHMARKS)!r})
from protocol import claim_stdout, serve

def note(name, answer):
    with open(sys.argv[1], "a") as file:
        print(name, file=file)
    return answer

claim_stdout()
print("not an answer")
serve({{"versions": {{}}}}, {{
    "steps": lambda num_steps: note(f"steps {{num_steps}}", {{"sec": 1.0, "images": 4}}),
    "evaluate": lambda: note("evaluate", {{"accuracy": 0.5}}),
}})
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def load(name):
    return importlib.import_module(name)


@pytest.mark.parametrize(("tests_first_block", "num_tests"), [(True, 1), (False, 0)])
def test_programs_are_asked_in_turn_and_end(tmp_path, monkeypatch, tests_first_block, num_tests):
    """The accuracy once, after the first block."""
    programs, run = load("programs"), load("run")
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(programs, "FOLDER", tmp_path)
    program = programs.Program("p", "program.py", (str(tmp_path / "asked"),))
    part = run.Part("title", "model", 7, [program], [], tests_first_block)
    found = run.measure(part, rounds=3, data_dir="x")["p"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["steps 7", *["evaluate"] * num_tests, "steps 7", "steps 7"]
    assert found["secs"] == [0.25] * 3
    assert found.get("accuracy") == (0.5 if num_tests else None)


def measured(secs, peer="", precision="float32", **more):
    return {"peer": peer, "precision": precision, "secs": [secs] * 3, **more}


def test_the_page_and_the_summary_are_made_of_measurements_alone():
    """The summary has each peer at its best, the page the accuracy where it was tested."""
    run = load("run")
    programs = {
        "manual × 2": measured(1e-3),
        "manual × 2, bfloat16": measured(5e-4, precision="bfloat16"),
        "JAX × 1": measured(2e-3, "JAX", settings="channels last"),
        "JAX × 2": measured(4e-3, "JAX"),
        "JAX × 1, bfloat16": measured(3e-3, "JAX", "bfloat16"),
    }
    part = {"title": "Networks", "model": "LeNet", "programs": programs,
            "ratios": [["manual × 2, bfloat16", "manual × 2"]]}  # fmt: skip
    results = {"date": "2026-01-01", "processor": "P", "cores": 2, "versions": {"jax": "1"},
               "parts": {"lenet": part}}  # fmt: skip
    page = run.render(results)
    assert "| manual × 2 | 1,000.0 | 1,000.0–1,000.0 |" in page
    assert "| LeNet | manual × 2, bfloat16 | manual × 2 | 0.500 | 0.500–0.500 |" in page
    assert [*run.summary(results)][2:] == [
        "| LeNet | manual × 2 | JAX × 1 | 0.500 | 0.500–0.500 |",
        "| LeNet | manual × 2, bfloat16 | JAX × 1 | 0.250 | 0.250–0.250 |",
        "| LeNet | manual × 2, bfloat16 | manual × 2 | 0.500 | 0.500–0.500 |",
    ]
    tested = measured(1e-4, images=[60000] * 3, accuracy=0.8727)
    results["parts"] = {"lenet_split": {**part, "programs": {"manual × 2": tested}, "ratios": []}}
    assert "| 6.00 | 0.8727 |" in run.render(results)


def test_programs_of_a_part_train_alike_and_lockstep_takes_their_flags():
    parts, lockstep = load("bench_parts").all_parts("peers"), load("own_training")
    for program in parts["lenet_split"].programs:
        assert {"--model=lenet", "--global_batch_size=256", "--recipe=fast", "--num_devices=2"} <= {
            *program.flags
        }
    for part in parts.values():
        own = [program for program in part.programs if program.file == "own_training.py"]
        assert own and all((BENCHMARKS / program.file).exists() for program in part.programs)
        for program in own:
            config = lockstep.parse_config([*program.flags, "--data_dir=x"])
            given = [flag for flag in program.flags if flag.startswith("--strategy=")]
            assert given in ([f"--strategy={config.distribution.strategy}"], [])


@pytest.mark.parametrize(("size", "num_steps"), [(256, 2), (64, 235), (1024, 40), (256, 2350)])
def test_the_peers_recipe_is_the_projects(size, num_steps):
    recipe, peer = RECIPES["fast"]["lenet"], load("peer_recipe").PEER_RECIPES["fast"]
    values = dataclasses.asdict(peer)
    assert values == {name: getattr(recipe, name) for name in values}
    assert not recipe.flip and not recipe.label_smoothing  # The programs have neither.
    base = load("protocol").LEARNING_RATES["lenet"]
    rates = peer.learning_rates(base, global_batch_size=size, num_steps=num_steps)
    peak = recipe.learning_rate(global_batch_size=size, num_steps=num_steps)
    schedule = learning_rate_schedule(recipe.create_optimizer(peak, num_steps))
    for step in np.unique(np.linspace(0, num_steps - 1, 41).astype(int)).tolist():
        # Keras computes in float32.
        assert rates[step] == pytest.approx(float(schedule(step)), abs=1e-7)


@pytest.mark.parametrize(
    ("program", "flags", "error"),
    [
        ("torch_pipeline.py", ["--num_devices=4"], "--num_devices=4 must be 2 or 3"),
        ("torch_pipeline.py", ["--micro_batches=3"], "must be a multiple of --micro_batches=3"),
        ("torch_fsdp.py", ["--num_devices=1"], "--num_devices=1 must be at least 2"),
        ("torch_ddp.py", ["--model=resnet18", "--recipe=fast"], "--recipe=fast: not available"),
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
    protocol, zeros = load("protocol"), np.zeros(num_examples, np.uint8)
    data = protocol.FashionMnist(zeros, zeros, zeros, zeros)
    job = protocol.BenchmarkJob("lenet", 32, 2, data, num_shards, {})
    batches = job.index_batches()
    assert [len(next(batches)) for _ in range(len(sizes) + 1)] == [*sizes, 32]
    assert protocol.describe(job, "")["images_per_epoch"] == sum(sizes)


def test_wrong_calls_get_one_line(monkeypatch, capsys):
    monkeypatch.delenv("FASHION_MNIST_DIR", raising=False)
    with pytest.raises(SystemExit, match=r"^error: --data_dir is missing"):
        load("run").main([])
    with pytest.raises(SystemExit) as stop:
        load("run").main(["--rounds=0", "--data_dir=x"])
    assert stop.value.code == 2 and "--rounds=0" in capsys.readouterr().err


def test_a_run_writes_the_page_once_every_part_is_there(tmp_path, monkeypatch, capsys):
    run, page = load("run"), tmp_path / "BENCHMARKS.md"

    def measure(part, *, rounds, data_dir):
        sample = {"secs": [0.1, 0.2], "images": [1, 1], "versions": {"numpy": "2"}}
        tested = {"accuracy": 0.87} if part.tests_first_block else {}
        return {
            p.name: {**sample, **tested, "peer": p.peer, "precision": p.precision}
            for p in part.programs
        }

    monkeypatch.setattr(run, "measure", measure)
    flags = ["--data_dir=x", f"--out={tmp_path}/out", f"--output={page}"]
    first, *others = load("bench_parts").all_parts()
    run.main([*flags, f"--only={first}"])
    assert not page.exists() and others[0] in capsys.readouterr().out.splitlines()[-1]
    drawn = []
    monkeypatch.setattr(run, "plot_bars", lambda *arguments: drawn.append(arguments))
    for name in others:
        run.main([*flags, f"--only={name}"])
    assert page.read_text() == (tmp_path / "out" / "bench.md").read_text()
    assert page.read_text().startswith("# Benchmarks")
    assert capsys.readouterr().out.endswith(f"saved {page}\n")
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {
        ".json", ".md", ".png", ".svg",
    }  # fmt: skip
    assert (tmp_path / "out" / "benchmarks.png").stat().st_size > 10_000
    title, panels, folder, _ = drawn[-1]
    assert folder == tmp_path and len(panels) == len(others) + 1 and "cores" in title
