"""Tests the comparison with other programs: requests, and the evaluation of answers."""

import argparse
import dataclasses
import importlib
import sys

import numpy as np
import pytest

from app.training.recipes import RECIPES
from conftest import ROOT
from strategies.tf_private import learning_rate_schedule

STAND_IN = """
import json, sys
print(json.dumps({"versions": {}}), flush=True)
for line in sys.stdin:
    print(sys.argv[2], line.strip(), file=open(sys.argv[1], "a"))
    answer = {"sec": 1.0, "images": 4} if line == "steps\\n" else {"accuracy": 0.5}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def load(name):
    return importlib.import_module(name)


def measured(secs, **more):
    return {"secs": [secs] * 3, "images": [60000] * 3, "versions": {"jax": "1"}, **more}


@pytest.mark.parametrize("tests_first_block", [True, False])
def test_programs_are_asked_in_turn_and_end(tmp_path, monkeypatch, tests_first_block):
    """The accuracy once, after the first block."""
    run, asked = load("run"), tmp_path / "asked"
    command = [sys.executable, "-c", STAND_IN, asked]
    monkeypatch.setattr(run, "command_of", lambda name, *_: [*command, name])
    part = run.Part("title", "", ("p", "q"), tests_first_block=tests_first_block)
    found = run.measure(part, argparse.Namespace(rounds=2))["p"]
    requests = ["steps", "evaluate"] if tests_first_block else ["steps"]
    first_round = [f"{name} {request}" for name in "pq" for request in requests]
    assert asked.read_text().splitlines() == [*first_round, "q steps", "p steps"]
    assert found["secs"] == [0.25] * 2
    assert found.get("accuracy") == (0.5 if tests_first_block else None)
    monkeypatch.setattr(run, "command_of", lambda *_: [sys.executable, "-c", "1 / 0"])
    with pytest.raises(SystemExit, match="p ended before it answered; it said last: ZeroDivision"):
        run.measure(part, argparse.Namespace(rounds=2))


def test_the_page_and_the_summary_are_made_of_measurements_alone(monkeypatch):
    """The summary has each peer at its best, the page the accuracy where it was tested."""
    run = load("run")
    programs = {
        "manual × 2": measured(1e-3), "manual × 2, bfloat16": measured(5e-4),
        "JAX × 1": measured(2e-3), "JAX × 2": measured(4e-3), "JAX × 1, bfloat16": measured(3e-3),
    }  # fmt: skip
    part = dataclasses.replace(run.PARTS["lenet"], title="LeNet", ratios=run.RATIOS[:1])
    monkeypatch.setitem(run.PARTS, "lenet", part)
    results = {"date": "2026-01-01", "processor": "P", "cores": 2, "versions": {"jax": "1"},
               "parts": {"lenet": programs}}  # fmt: skip
    page = run.render(results)
    rows = [
        "| LeNet | manual × 2 | 1,000 | JAX × 1 | 500 | 0.500 (0.500–0.500) |",
        "|  | manual × 2, bfloat16 | 2,000 | JAX × 1 | 500 | 0.250 (0.250–0.250) |",
        "|  | manual × 2, bfloat16 | 2,000 | manual × 2 | 1,000 | 0.500 (0.500–0.500) |",
    ]
    assert [*run.summary(results)][2:] == rows
    assert "\n".join(rows) in page and "accuracies" not in page
    programs["manual × 2"]["accuracy"], programs["JAX × 1"]["accuracy"] = 0.8727, 0.8712
    results["parts"] = {"lenet": programs}
    assert "are 0.8712 to 0.8727." in run.render(results)


def test_every_program_has_a_command_that_its_framework_understands():
    run, program, config_of = load("run"), load("program"), load("with_lockstep").config_of
    options, used = argparse.Namespace(peers_python="peers", data_dir="x"), set()
    for part in run.PARTS.values():
        used |= {*part.programs}
        assert {each for pair in part.ratios for each in pair} <= {*part.programs}
        for name in part.programs:
            python, _, *words = run.command_of(name, part, options)
            job = program.parse(words)
            assert (python == "peers") == name.startswith(("PyTorch", "JAX"))
            assert name.split(",")[0].endswith(str(job.num_devices)) or "," in name
            assert ("bfloat16" in name) == (job.precision == "bfloat16")
            assert job.recipe == "d2l" or (job.model, job.global_batch_size) == ("lenet", 256)
            if job.framework == "lockstep":
                assert name.startswith(config_of(job).distribution.strategy)
    assert used == {*run.PROGRAMS}


@pytest.mark.parametrize(("size", "num_steps"), [(256, 2), (64, 235), (1024, 40), (256, 2350)])
def test_the_peers_recipe_is_the_projects(size, num_steps):
    recipe, peer = RECIPES["fast"]["lenet"], load("program").RECIPES["fast"]
    values = dataclasses.asdict(peer)
    assert values == {name: getattr(recipe, name) for name in values}
    assert not recipe.flip and not recipe.label_smoothing  # The programs have neither.
    rates = peer.learning_rates(0.2, global_batch_size=size, num_steps=num_steps)
    peak = recipe.learning_rate(global_batch_size=size, num_steps=num_steps)
    schedule = learning_rate_schedule(recipe.create_optimizer(peak, num_steps))
    for step in np.unique(np.linspace(0, num_steps - 1, 41).astype(int)).tolist():
        # Keras computes in float32.
        assert rates[step] == pytest.approx(float(schedule(step)), abs=1e-7)


@pytest.mark.parametrize(
    ("num_examples", "framework", "sizes"),
    [(100, "torch_pipeline", [32, 32, 32, 4]), (98, "torch_pipeline", [32, 32, 32]),
     (99, "torch_ddp", [32, 32, 32]), (98, "jax", [32, 32, 32, 2])],
)  # fmt: skip
def test_a_last_batch_without_equal_parts_is_dropped(num_examples, framework, sizes):
    job = load("program").parse([framework, "--global_batch_size=32", "--data_dir=x"])
    vars(job)["data"] = [(np.zeros(num_examples), np.zeros(num_examples))] * 2
    batches = job.index_batches()
    assert [len(next(batches)) for _ in range(len(sizes) + 1)] == [*sizes, 32]


def test_wrong_calls_get_one_line(monkeypatch, capsys):
    monkeypatch.delenv("FASHION_MNIST_DIR", raising=False)
    with pytest.raises(SystemExit, match=r"^error: --data_dir is missing"):
        load("run").main([])
    with pytest.raises(SystemExit) as stop:
        load("run").main(["--rounds=0", "--data_dir=x"])
    assert stop.value.code == 2 and "--rounds=0" in capsys.readouterr().err


def test_a_run_writes_the_page_once_every_part_is_there(tmp_path, monkeypatch, capsys):
    run, page = load("run"), tmp_path / "BENCHMARKS.md"

    def measure(part, options):
        tested = {"accuracy": 0.87} if part.tests_first_block else {}
        return {name: measured(0.1, **tested) for name in part.programs}

    monkeypatch.setattr(run, "measure", measure)
    run.main(["--quick", "--data_dir=x", f"--out={tmp_path}/quick"])
    lines = capsys.readouterr().out.splitlines()
    assert sum("PyTorch DDP" in line for line in lines) == 4 and not any("JAX" in x for x in lines)
    flags = ["--data_dir=x", f"--out={tmp_path}/out", f"--output={page}"]
    first, *others = run.PARTS
    run.main([*flags, f"--only={first}"])
    assert not page.exists() and f"not measured yet: {others[0]}" in capsys.readouterr().out
    drawn = []
    monkeypatch.setattr(run, "plot_ratios", lambda *arguments: drawn.append(arguments))
    for name in others:
        run.main([*flags, f"--only={name}"])
    assert page.read_text() == (tmp_path / "out" / "bench.md").read_text()
    assert page.read_text().startswith("# Benchmarks")
    assert capsys.readouterr().out.endswith(f"saved {page}\n")
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {
        ".json", ".md", ".png", ".svg",
    }  # fmt: skip
    assert (tmp_path / "out" / "benchmarks.png").stat().st_size > 10_000
    results, path = drawn[-1]
    assert path == tmp_path / run.FIGURE and len({*run.comparisons(results)}) > len(run.PARTS)
