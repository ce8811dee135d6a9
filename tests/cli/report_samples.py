"""Records for tests of reports, as written by every command, without training."""

import dataclasses

from app.commands.benchmark import Case, benchmark_record
from app.options import Config
from app.records.files import write_json
from app.records.history import summarize, write_history
from app.records.run_directory import HEADER
from app.report.page import DIFFERENT, IDENTICAL
from lockstep.answer.json import record_of
from lockstep.engine.verdict import Measured, Place, Verdict
from tests.training.test_checkpoint import RUN_METADATA, make_history

CPUS = ["/device:CPU:0", "/device:CPU:1"]
GPUS = ["/device:GPU:0", "/device:GPU:1"]


def write_config(path, command="train", **more):
    path.mkdir(parents=True, exist_ok=True)
    config = Config.of(command).result_fields()
    write_json(path / "config.json", {**HEADER, **config, "command": command, **more})


def write_training(path, *, num_epochs=4, config=None, digest="ee", **changes):
    """Writes the files of `train`; returns its summary."""
    config = {**RUN_METADATA.config, "strategy": "manual", **(config or {})}
    honest = {"dataset": "fashion_mnist", "simulated_devices": False, "devices": GPUS}
    metadata = dataclasses.replace(RUN_METADATA, **{**honest, "config": config, **changes})
    epochs = make_history(num_epochs)
    epochs[-1] = dataclasses.replace(epochs[-1], weights_sha256=digest * 32)
    write_config(path, strategy=config["strategy"])
    write_history(path, metadata, epochs, lambda runs, out_dir: None)
    return summarize(metadata, epochs)


def write_comparison(path):
    strategies = ("single", "manual", "mirrored")
    write_config(path, "compare", strategies=list(strategies))
    summaries = [
        write_training(path / name, config={"strategy": name}, digest=digest)
        for name, digest in zip(strategies, ("aa", "bb", "bb"), strict=True)
    ]
    expected = {"absolute": 0.25, "relative": 0.5, "where": "logits/kernel", "why": "So."}
    equal = {"absolute": 0.0, "relative": 0.0, "where": "", "why": ""}
    pairs = [
        {"trainings": ["single", "manual"], "outcome": "different, as expected", **expected},
        {"trainings": ["manual", "mirrored"], "outcome": IDENTICAL, **equal},
    ]
    write_json(path / "compare.json", {"command": "compare", "runs": summaries, "pairs": pairs})


LOST = Place("sum", 1, ("conv1/kernel",), 8, ("rank 1",))
NODES = Measured("examples", 0.0, 2, 2), Measured("sum", 0.05, 0, 8)


def write_verification(path, *, fault=None, **changes):
    """Writes the files of `verify` for two strategies; one may have a fault."""
    write_config(path, "verify")
    clean = Verdict("clean", measured=NODES, steps=(1, 2), reference="training on one device")
    wrong = dataclasses.replace(
        clean, status="fault", place=LOST, formula=("conv1/kernel = 1·g0 + 0·g1",),
        name="lost_part", reason="the gradient of rank 1 does not count",
    )  # fmt: skip
    trainings = {
        name: record_of(dataclasses.replace(verdict, training=name))
        for name, verdict in (("manual", wrong if fault else clean), ("mirrored", clean))
    }
    outcome = DIFFERENT if fault else IDENTICAL
    sizes = {"absolute": 3e-9, "relative": 1e-7, "where": "weights, logits/kernel", "why": ""}
    record = {
        "command": "verify", "injected_fault": fault or "",
        "trainings": trainings,
        "pairs": [{"trainings": ["manual", "mirrored"], "outcome": outcome, **sizes}],
        "facts": {"model": "lenet", "versions": {"tensorflow": "2"}},
    }  # fmt: skip
    write_json(path / "verify.json", {**record, **changes})


def write_benchmark(path):
    """Writes the files of `benchmark`: two devices are 1.5 times as fast as one."""
    write_config(path, "benchmark")
    cases = []
    for name, devices, speed in (("single", GPUS[:1], 1000.0), ("manual", GPUS, 1500.0)):
        facts = dataclasses.replace(RUN_METADATA, devices=devices, simulated_devices=False)
        cases.append(Case(name, facts, [speed] * 10, [0.1] * 10))
    write_json(path / "benchmark.json", benchmark_record(Config.of("benchmark"), cases))


def write_everything(folder):
    """Writes a run of every kind to a folder, with all caveats."""
    write_comparison(folder / "compared")
    generated = {"dataset": "synthetic", "simulated_devices": True, "devices": CPUS}
    write_training(folder / "generated", digest="dd", **generated)
    fault = "drop_gradient:replica=1"
    write_training(folder / "faulty", config={"inject": fault}, num_epochs=1, digest="cc")
    write_config(folder / "begun")
    write_verification(folder / "proved")
    write_verification(folder / "refuted", fault=fault)
    write_benchmark(folder / "measured")
