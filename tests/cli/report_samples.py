"""Records for tests of reports, as written by every command, without training."""

import contextlib
import dataclasses
import io

from app.commands.compare import describe
from app.options import Config
from app.performance.benchmark_output import write_benchmark
from app.performance.case import Block, Case, Facts, Sample
from app.performance.case_comparison import all_comparisons
from app.records.caveats import DATASET_CAVEATS, injected_fault_caveat
from app.records.files import write_json
from app.records.history import write_history
from app.runtime.errors import MismatchError
from app.verification.comparison import EXPECTED
from app.verification.output import IDENTICAL, Pair, Results, Run, report
from lockstep.answer.verdict import BY_DESIGN, FAULT, STAGES, Finding, Measurement, Verdict, merged
from tests.training.test_records import make_history, make_summary

CPUS = ["/device:CPU:0", "/device:CPU:1"]
VERSIONS = {"python": "3.11", "tensorflow": "2.21"}
HONEST = {
    "status": "finished", "dataset": "fashion_mnist", "simulated_devices": False,
    "devices": ["/device:GPU:0", "/device:GPU:1"], "versions": VERSIONS, "injected_fault": "",
    "images_per_sec": 1234.5, "weights_sha256": "ee" * 32,
}  # fmt: skip


def write_config(path, config, **more):
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", {"written_by": "lockstep", **config.result_fields(), **more})


def write_training(path, *, num_epochs=4, **changes):
    """Writes the files of `train`; returns its summary."""
    summary = make_summary(**{**HONEST, **changes})
    write_config(path, Config.of(), strategy=summary.strategy)
    write_history(path, make_history(num_epochs), summary)
    return summary


def write_comparison(path):
    strategies = ("single", "manual", "mirrored")
    config = Config.of("compare", strategies=strategies)
    write_config(path, config, strategy=",".join(strategies))
    summaries = [
        write_training(path / name, strategy=name, weights_sha256=digest * 32)
        for name, digest in zip(strategies, ("aa", "bb", "bb"), strict=True)
    ]
    pairs = [
        Pair(("single", "manual"), EXPECTED, 0.25, 0.5, "logits/kernel", "So."),
        Pair(("manual", "mirrored"), IDENTICAL),
    ]
    write_json(path / "compare.json", {"shown": describe(config, summaries, pairs).to_record()})


CLIPPED = Finding(
    "clipping", FAULT, "clipped_before_the_sum", "clipnorm=0.1 is applied on each replica",
    (0, 1, 2), (), ("dense/kernel", "dense/bias"), 0.47, 1e-5,
)  # fmt: skip
LOCAL = Finding(
    "forward", BY_DESIGN, "local_statistics", "bn normalises the examples of each replica",
    (1,), ("replica 0", "replica 1"), tuple(f"bn_{i}" for i in range(15)),
)  # fmt: skip
LOST = Finding(
    "all-reduce", FAULT, "lost_replica", "the sum is without replica 1", (1,), ("replica 1",),
    ("conv1/kernel",), 0.5, 1e-7,
)  # fmt: skip


def make_run(*findings, name="fit", replicas=2, about="", **changes):
    """Returns a verified training with these findings."""
    given = {
        "reference": "training that my_case.py defines on one device", "steps": (0, 1, 2, 3),
        "num_replicas": replicas, "findings": merged(findings), "framework": "keras",
        "checked": ("start",) * (replicas > 1) + ("forward", "clipping", "update"),
        "tolerance": "float64", "step_names": {3: "an evaluation"},
    }  # fmt: skip
    verdict = Verdict(name, **given | changes)
    return Run(verdict, CPUS[:replicas], replicas > 1, VERSIONS, about)


def write_run(path, runs, pairs=(), caveats=(), **facts):
    """Writes the files of `verify`."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"written_by": "lockstep", "command": "verify", **facts}
    write_json(path / "config.json", {**config, "strategy": ",".join(runs)})
    with contextlib.suppress(MismatchError), contextlib.redirect_stdout(io.StringIO()):
        setup = {"model": f"{facts.get('model', 'network')}, batch 8, seed 0, 2 simulated CPUs"}
        report(path, Results(runs, facts, setup, pairs, caveats))


def write_case(path, runs=None, **facts):
    """Writes the files of `verify --case`: a clean strategy, one by design, one with a fault."""
    runs = runs or {
        "single": make_run(name="single", replicas=1),
        "mirrored": make_run(LOCAL, name="mirrored"),
        "keras_fit": make_run(LOCAL, CLIPPED, name="keras_fit"),
    }
    write_run(path, runs, case="folder/my_case.py", **facts)


def write_verification(path, *, fault=None):
    """Writes the files of `verify` for two steps of two strategies; one may have a fault."""

    def measured(share, same):
        return tuple(
            Measurement(step, stage, "logits/kernel", f"replica {r}", share * 1e-7, 1e-7, same)
            for step in (0, 1)
            for stage in ("gradients", "all-reduce", "update")
            for r in (0, 1)
        )

    lost = Measurement(0, "all-reduce", "conv1/kernel", "replica 1", 0.5, 1e-7)
    of_model = {
        "reference": "training on one device", "steps": (0, 1), "step_names": {}, "checked": STAGES
    }  # fmt: skip
    runs = {
        "manual": make_run(
            *([LOST] if fault else []), name="manual", about="2 shards on 2 devices",
            measurements=measured(0.25, False) + ((lost,) if fault else ()), **of_model,
        ),
        "mirrored": make_run(name="mirrored", measurements=measured(0.0, True), **of_model),
    }  # fmt: skip
    outcome = "different" if fault else "equal within rounding"
    pair = Pair(("manual", "mirrored"), outcome, 3e-9, 1e-7, "weights, logits/kernel")
    caveats = [injected_fault_caveat(fault)] if fault else []
    write_run(path, runs, [pair], [*caveats, DATASET_CAVEATS["synthetic"]], model="lenet")


FACTS = Facts(
    devices=["/device:CPU:0"], simulated_devices=False, cores=2, intra_op_threads=1,
    dataset="fashion_mnist", global_batch_size=256, jit_compile=False, tensor_float_32=False,
    all_reduce="reduce_to_one", compile_sec=1.0, versions={"tensorflow": "2"},
)  # fmt: skip


def make_sample(
    strategy="manual", num_devices=1, step_secs=(1.0,) * 5, *, simulated=False, tracings=0,
    precision="float32", global_batch_size=256, **facts,
):  # fmt: skip
    """Returns a sample with these measurements; on real devices by default."""
    config = Config.of(
        strategy=strategy, precision=precision, global_batch_size=global_batch_size,
        num_devices=None if strategy == "single" else num_devices,
    )  # fmt: skip
    kind = "CPU" if simulated else "GPU"
    found = dataclasses.replace(
        FACTS,
        devices=[f"/device:{kind}:{i}" for i in range(num_devices)],
        simulated_devices=simulated,
        global_batch_size=global_batch_size,
        **facts,
    )
    blocks = [Block(10, 10 * global_batch_size, 10 * sec, tracings) for sec in step_secs]
    return Sample(Case(config), found, blocks, 1 << 20)


def write_measured_cases(path):
    """Writes the files of `benchmark`: two devices are 1.5 times as fast as one."""
    config = Config.of("benchmark")
    write_config(path, config, command="benchmark")
    cases = [make_sample("single", 1, (1.5,) * 5), make_sample("manual", 2, (1.0,) * 5)]
    write_benchmark(path, config, cases, all_comparisons(cases))


def write_everything(folder):
    """Writes a run of every kind to a folder, with all caveats."""
    write_comparison(folder / "compared")
    write_training(
        folder / "generated", dataset="synthetic", simulated_devices=True, devices=CPUS,
        changes=["recipe d2l → fast"], weights_sha256="dd" * 32,
    )  # fmt: skip
    write_training(folder / "faulty", injected_fault="drop_gradient:replica=1", num_epochs=1)
    write_config(folder / "begun", Config.of())
    write_verification(folder / "proved")
    write_verification(folder / "refuted", fault="drop_gradient:replica=1")
    write_case(folder / "case")
    write_measured_cases(folder / "measured")
