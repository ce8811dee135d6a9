"""Tests the comparison with other programs: requests, and the evaluation of answers."""

import argparse
import dataclasses
import importlib
import json
import os
import sys
import textwrap

import numpy as np
import pytest

from app.training.recipes import RECIPES
from strategies.tf_private import learning_rate_schedule
from tests.conftest import ROOT
from tests.verifier.recorder_scripts import needs, run_script

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


@pytest.mark.parametrize("num_steps", [0, 3])
def test_programs_are_asked_in_turn_and_end(tmp_path, monkeypatch, capsys, num_steps):
    """The accuracy once, after the first block, if a block is an epoch; the time is told first."""
    run, asked = load("run"), tmp_path / "asked"
    command = [sys.executable, "-c", STAND_IN, asked]
    monkeypatch.setattr(run, "start", lambda name, *_: run.Running(name, [*command, name]))
    part = run.Part("title", "", ("p", "q"), num_steps=num_steps)
    options = argparse.Namespace(rounds=2, quick=False)
    measured = run.measure(part, options)
    assert [len(found["p"]["secs"]) for found in measured] == [1, 2]  # After each round.
    requests = ["steps", "evaluate"] if num_steps else ["steps"]
    first_round = [f"{name} {request}" for name in "pq" for request in requests]
    probes = [f"{run.OWN[0]} steps"] * 3
    assert asked.read_text().splitlines() == [*probes, *first_round, "q steps", "p steps"]
    steps = num_steps or 2  # Of 1 s each.
    told = f"title: 2 programs, 2 rounds of blocks of {steps} steps; about 1 minute"
    assert capsys.readouterr().out.splitlines()[0] == told
    failing = [sys.executable, "-c", "1 / 0"]
    monkeypatch.setattr(run, "start", lambda *_: run.Running("p", failing))
    with pytest.raises(SystemExit, match="p ended before it answered; it said last: ZeroDivision"):
        next(run.measure(part, options))


def test_the_page_and_the_summary_are_made_of_measurements_alone(monkeypatch):
    """The summary has each peer at its best, the page the accuracy where it was tested."""
    run = load("run")
    programs = {
        "manual × 2": measured(1e-3), "manual × 2, bfloat16": measured(5e-4),
        "JAX × 1": measured(2e-3), "JAX × 2": measured(4e-3), "JAX × 1, bfloat16": measured(3e-3),
        "Keras fit × 2": measured(4e-3), "Keras fit × 2, oneDNN": measured(2e-3),
    }  # fmt: skip
    results = {
        "dates": {"lenet": "2026-01-01"}, "rounds": {"lenet": (3, 3)}, "left_out": [],
        "versions": {"jax": "1", "cpu_kernels": "x"}, "parts": {"lenet": programs},
    }  # fmt: skip
    part = dataclasses.replace(run.PARTS["lenet"], title="LeNet", ratios=run.parts.RATIOS[:1])
    monkeypatch.setitem(run.PARTS, "lenet", part)
    page = run.page.render("P", results)
    rows = [
        "| LeNet | manual × 2 | 1,000 | JAX × 1 | 500 | 0.500 (0.500–0.500) |",
        "|  | manual × 2 | 1,000 | Keras fit × 2 | 250 | 0.250 (0.250–0.250) |",
        "|  | manual × 2 | 1,000 | Keras fit × 2, oneDNN | 500 | 0.500 (0.500–0.500) |",
        "|  | manual × 2, bfloat16 | 2,000 | JAX × 1 | 500 | 0.250 (0.250–0.250) |",
        "|  | manual × 2, bfloat16 | 2,000 | Keras fit × 2 | 250 | 0.125 (0.125–0.125) |",
        "|  | manual × 2, bfloat16 | 2,000 | Keras fit × 2, oneDNN | 500 | 0.250 (0.250–0.250) |",
        "|  | manual × 2, bfloat16 | 2,000 | manual × 2 | 1,000 | 0.500 (0.500–0.500) |",
    ]
    assert [*run.page.summary(results)][2:] == rows
    assert "\n".join(rows) in page and "accuracies" not in page and "cpu_kernels" not in page
    assert "Not measured yet: LeNet, batch 256, beside Keras;" in page
    programs["manual × 2"]["accuracy"], programs["JAX × 1"]["accuracy"] = 0.8727, 0.8712
    results["left_out"] = ["bfloat16, which is emulated"]
    page = run.page.render("P", results)
    assert "are 0.8712 to 0.8727." in page
    assert "Not measured: bfloat16, which is emulated." in page


def test_a_page_keeps_the_tables_of_other_processors():
    run, page = load("run"), ""
    for heading, text in (("A: AVX2", "old"), ("B: AMX", "other"), ("A: AVX2", "new")):
        page = run.page.with_section(page, f"## {heading}\n\n{text}\n")
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert headings == ["# Benchmarks", "## A: AVX2", "## B: AMX"]
    assert "new" in page and "other" in page and "old" not in page
    assert page == run.page.with_section(page, "## A: AVX2\n\nnew")
    names = {run.figure.figure_name(name) for name in ("A: AVX2, 2 cores", "A: AMX, 2 cores")}
    assert names == {"benchmarks-a-avx2-2-cores.png", "benchmarks-a-amx-2-cores.png"}


def test_a_section_keeps_the_rows_of_trainings_that_are_not_measured_again():
    run = load("run")
    measure = lambda name, date, sec: {  # noqa: E731
        "dates": {name: date}, "rounds": {name: (3, 3)}, "left_out": [],
        "versions": {"numpy": date[-1]} | ({"jax": "1"} if name == "lenet" else {}),
        "parts": {name: {"manual × 2": measured(sec), "JAX × 1": measured(2e-3),
                         "Keras fit × 2": measured(4e-3)}},
    }  # fmt: skip
    page = "# Benchmarks\n\n## Q\n\n2026-01-01, no GPU; x 1.\n"
    page += "\n| Training | … |\n| --- | --- |\n| LeNet, batch 256, recipe fast | old | … |\n"
    page += f"\n{run.page._ACCURACIES} 0.1 to 0.2.\n"
    for name, date, sec in (
        ("lenet", "2026-01-03", 1e-3), ("resnet18", "2026-01-01", 1e-3),
        ("resnet18", "2026-01-02", 2e-3),
    ):  # fmt: skip
        page = run.page.with_section(page, run.page.render("P", measure(name, date, sec), page))
    assert "\n2026-01-03, no GPU; numpy 3, jax 1: LeNet, batch 256.\n" in page
    assert "\n2026-01-02, no GPU; numpy 2: ResNet-18, batch 64.\n" in page
    assert page.count("manual × 2") == 4 and page.count("| Keras fit × 2 |") == 2
    assert "| LeNet, batch 256 | manual × 2 | 1,000 | JAX × 1 | 500 | 0.5" in page
    assert "| ResNet-18, batch 64 | manual × 2 | 500 | JAX × 1 | 500 | 1.0" in page
    missing = "LeNet, batch 256, beside Keras; ResNet-18, batch 64, beside Keras; LeNet, batch 256,"
    assert f"Not measured yet: {missing} recipe fast." in page
    assert page.count("recipe fast | old") == page.count("are 0.1 to 0.2") == 1
    again = run.page.with_section(
        page, run.page.render("Q", measure("lenet", "2026-01-05", 1), page)
    )
    assert again.count("recipe fast | old") == again.count("are 0.1 to 0.2") == 1
    assert "\n2026-01-01, no GPU; x 1: LeNet, batch 256, recipe fast.\n" in again


def test_the_figure_of_a_processor_is_drawn_from_its_table(tmp_path, monkeypatch):
    """Programs of two precisions are marked, trainings have panels with their recipe."""
    figure = load("figure")
    section = (ROOT / "docs" / "BENCHMARKS.md").read_text("utf-8").split("\n## ")[1]
    rows = figure.read_rows(section)
    assert len(rows) == section.count(" × ") // 2  # Each row of the table names two programs.
    names = ["ResNet-18, batch 64, recipe d2l", "LeNet, batch 256, recipe d2l"]
    assert [*dict.fromkeys(row.training for row in rows)] == [
        *names,
        "LeNet, batch 256, recipe fast",
    ]
    mixed = [row.label for row in rows if row.kind == "bfloat16 against float32: another precision"]
    assert mixed[0] == "manual × 2, bfloat16  /  JAX × 1, float32" and len(mixed) == 4
    monkeypatch.setitem(figure.matplotlib.rcParams, "svg.fonttype", "none")
    page = tmp_path / "page.md"
    page.write_text(f"# Benchmarks\n\n## A: AVX2\n{section}", encoding="utf-8")
    figure.main([str(page)])
    drawn = (tmp_path / "benchmarks-a-avx2.svg").read_text("utf-8")
    for row in rows:
        assert row.label in drawn and f"{row.ratio:.3f}" in drawn and row.training in drawn


AVX2 = frozenset({"avx2"})


def test_what_a_processor_cannot_show_is_left_out_with_the_reason():
    why_left_out = load("parts").why_left_out
    vnni = AVX2 | {"avx512_vnni"}
    for name, flags in (
        ("manual × 2, bfloat16", AVX2), ("PyTorch DDP × 2, bfloat16", AVX2),
        ("Keras fit × 2, oneDNN", vnni),
    ):  # fmt: skip
        assert why_left_out(name, flags)
    for name, flags in (
        ("manual × 2, bfloat16", AVX2 | {"avx512_bf16"}), ("manual × 2, Eigen", vnni),
        ("manual × 2, bfloat16", frozenset()),  # Unknown, as on ARM.
        ("Keras fit × 2, oneDNN", AVX2), ("Keras fit × 2", AVX2),
    ):  # fmt: skip
        assert not why_left_out(name, flags)


@pytest.mark.parametrize("given", [None, "0", "1"])
def test_each_program_gets_its_kernels(monkeypatch, given):
    """Keras and d2l those of TensorFlow, this project its own, whatever the user has chosen."""
    parts = load("parts")
    variable = parts.kernels.VARIABLE
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(parts.kernels.platform, "machine", lambda: "x86_64")
    if given:
        monkeypatch.setenv(variable, given)
    for flags, limit, own, of_keras in (
        (AVX2, "", "1", None), (AVX2 | {"avx512_vnni"}, "AVX2", "1", "0"),
        (frozenset(), "", None, None),
    ):  # fmt: skip
        monkeypatch.setattr(parts.kernels, "read_flags", lambda flags=flags: flags)
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        for name, expected in {
            "manual × 2": own, "manual × 2, bfloat16": own, "manual × 2, Eigen": "0",
            "Keras fit × 2": of_keras, "d2l, eager loop × 2": of_keras,
            "Keras fit × 2, oneDNN": "1",
        }.items():  # fmt: skip
            assert parts.environment_of(name)[variable] == expected, (name, flags)


def test_every_program_has_a_command_that_its_framework_understands():
    run, program, config_of = load("run"), load("program"), load("with_lockstep").config_of
    options, used = argparse.Namespace(peers_python="peers", data_dir="x"), set()
    for part in run.PARTS.values():
        used |= {*part.programs}
        assert {each for pair in part.ratios for each in pair} <= {*part.programs}
        for name in part.programs:
            python, _, *words = run.command_of(name, part, 7, options)
            job = program.parse(words)
            assert (python == "peers") == name.startswith(("PyTorch", "JAX"))
            assert name.split(",")[0].endswith(str(job.num_devices)) or "," in name
            assert ("bfloat16" in name) == (job.precision == "bfloat16")
            assert job.recipe == "d2l" or (job.model, job.global_batch_size) == ("lenet", 256)
            assert job.num_steps == 7
            if job.framework == "lockstep":
                assert name.startswith(config_of(job).distribution.strategy)
    assert used == {*run.PROGRAMS}


@pytest.mark.parametrize(("size", "num_steps"), [(256, 2), (64, 235)])
def test_the_peers_recipe_is_the_projects(size, num_steps):
    recipe, peer = RECIPES["fast"]["lenet"], load("program").RECIPES["fast"]
    values = dataclasses.asdict(peer)
    assert values == {name: getattr(recipe, name) for name in values}
    assert not recipe.label_smoothing  # The programs have none.
    rates = peer.learning_rates(0.2, global_batch_size=size, num_steps=num_steps)
    peak = recipe.learning_rate(global_batch_size=size, num_steps=num_steps)
    schedule = learning_rate_schedule(recipe.create_optimizer(peak, num_steps))
    for step in np.unique(np.linspace(0, num_steps - 1, 16).astype(int)).tolist():
        # Keras computes in float32.
        assert rates[step] == pytest.approx(float(schedule(step)), abs=1e-7)


@needs("torch")
def test_the_programs_of_pytorch_shift_half_of_the_images():
    script = """
        import collections, program, torch, with_torch
        trainer = object.__new__(with_torch.Trainer)
        trainer.recipe = program.RECIPES["fast"]
        trainer.generator = torch.Generator().manual_seed(0)
        images = torch.zeros(4000, 1, 5, 7, dtype=torch.uint8)
        images[:, 0, 2, 3] = 9
        found = trainer.augmented(images).nonzero()[:, 2:].tolist()
        places = collections.Counter(map(tuple, found))
        assert {*places} == {(y, x) for y in (1, 2, 3) for x in (2, 3, 4)}, places
        assert 1800 < places[2, 3] < 2200 and min(places.values()) > 150, places
    """
    ended = run_script("torch", "-c", textwrap.dedent(script), PYTHONPATH=str(ROOT / "benchmarks"))
    assert not ended.returncode, ended.stderr


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


def test_a_limit_is_that_of_all_programs_and_of_the_processors_name(tmp_path, monkeypatch, capsys):
    run = load("run")
    for name in run.ISA["avx2"]:
        monkeypatch.setenv(name, "--own" if name == "XLA_FLAGS" else "")
    monkeypatch.setattr(run.kernels, "read_flags", lambda: AVX2 | {"avx512f", "amx_bf16"})
    monkeypatch.setattr(run, "measure", lambda part, options: sys.exit("measured"))
    flags = ["--only=lenet", "--data_dir=x", f"--out={tmp_path}"]
    for more, told in (([], ": AVX-512, AMX, "), (["--isa=avx2"], " limited to AVX2, ")):
        with pytest.raises(SystemExit, match="measured"):
            run.main([*flags, *more])
        assert told in capsys.readouterr().out
    environment = {**os.environ, **run.parts.environment_of("manual × 2")}
    assert environment["XLA_FLAGS"] == f"--own {run.ISA['avx2']['XLA_FLAGS']}"
    assert environment["ATEN_CPU_CAPABILITY"] == "avx2"
    with pytest.raises(SystemExit, match="ONEDNN_MAX_CPU_ISA limits some programs only"):
        run.main(flags)


def test_wrong_calls_and_other_files_are_told_before_anything_is_measured(tmp_path, monkeypatch):
    run = load("run")
    monkeypatch.delenv("FASHION_MNIST_DIR", raising=False)
    monkeypatch.setattr(run, "measure", lambda part, options: sys.exit("measured"))
    (tmp_path / "page.md").write_bytes(b"\xff")
    (tmp_path / "bench.json").write_text('{"A": {"parts": {"x": 1}}}')
    given = ["--data_dir=x", f"--out={tmp_path}/new"]
    for flags, told in (
        ([], "--data_dir is missing"), ([*given, f"--output={tmp_path}/page.md"], "other places"),
        ([*given, f"--out={tmp_path}/bench.json"], "other places"),
        ([*given, f"--out={tmp_path}"], "bench.json has no results of this program"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=f"^error: .*{told}"):
            run.main(flags)
    with pytest.raises(SystemExit, match="2"):
        run.main(["--rounds=0", *given])


def test_each_round_and_part_is_written_at_once(tmp_path, monkeypatch, capsys):
    """Also if it is interrupted; the page has only parts of which all rounds are measured."""
    run, page, out = load("run"), tmp_path / "BENCHMARKS.md", tmp_path / "out"
    page.write_text("# Benchmarks\n\n## Another processor\n\n| kept |\n")
    out.mkdir()
    another = {"parts": {"lenet": {}}, "rounds": {"lenet": [9, 9]}}
    (out / "bench.json").write_text(json.dumps({"Another": another}))
    first, *others = run.PARTS
    interrupted = run.PARTS[first].title

    asked = []

    def measure(part, options):
        asked.append(part)
        tested = {"accuracy": 0.87} if part.tests_first_block else {}
        for number in range(options.rounds):
            yield {name: measured(0.1, **tested) for name in part.programs}
            if part.title == interrupted and number == 1:
                sys.exit("interrupted")

    def results():
        written = json.loads((out / "bench.json").read_text())
        assert written.pop("Another") == another
        return written.popitem()[1]

    monkeypatch.setattr(run, "measure", measure)
    flags = ["--data_dir=x", f"--out={out}", f"--output={page}", "--rounds=3"]
    with pytest.raises(SystemExit, match="interrupted"):
        run.main([*flags, f"--only={first}"])
    assert page.read_text().count("\n## ") == 1  # Nothing of two rounds of three.
    assert results()["rounds"] == {first: [2, 3]}
    rows = run.page.render("P", results()).splitlines()
    assert not [line for line in rows if line.startswith("| ") and "×" in line]
    interrupted = ""
    with monkeypatch.context() as patch:
        patch.setattr(run.figure, "draw_ratios", lambda *arguments: None)
        run.main([*flags, f"--only={first}"])
        assert "| kept |" in page.read_text() and "Not measured yet" in page.read_text()
        elsewhere = f"--out={tmp_path / 'elsewhere'}"  # Without the measurements of the first.
        run.main([*flags, f"--only={others[0]}", elsewhere])
        titles = [run.PARTS[name].title for name in (first, others[0])]
        assert all(f"| {title} |" in page.read_text() for title in titles)
        for name in others[:-1]:
            run.main([*flags, f"--only={name}"])
    run.main([*flags, f"--only={others[-1]}"])
    assert results()["rounds"] == {name: [3, 3] for name in run.PARTS}
    text = page.read_text()
    assert text.startswith("# Benchmarks") and "Not measured yet" not in text
    assert "| kept |" in text and text.count("\n## ") == 2
    assert capsys.readouterr().out.endswith(f"saved {page}\n")
    asked.clear()
    monkeypatch.chdir(tmp_path)
    run.main(["--quick", "--data_dir=x", f"--output={tmp_path}/quick.md"])  # PyTorch alone.
    assert [part.title.split(",")[0] for part in asked] == ["LeNet", "ResNet-18"]
    assert not any(name.startswith(("JAX", "Keras")) for part in asked for name in part.programs)
    assert not (tmp_path / "quick.md").exists()
    (figure,) = tmp_path.glob("benchmarks-*.png")
    assert figure.stat().st_size > 10_000 and figure.with_suffix(".svg").exists()
