"""Records for tests of reports, as written by every command, without training."""

from app.commands.compare import describe
from app.options import Config
from app.performance.benchmark_output import write_benchmark
from app.performance.case_comparison import all_comparisons
from app.records.files import write_json
from app.records.history import write_history, write_summary
from app.verification.case_output import describe_case
from app.verification.difference import WeightDifference
from app.verification.measurement import Measurement
from app.verification.recorded import Recorded
from app.verification.run_comparison import PairVerdict as WeightVerdict
from app.verification.split import Split
from app.verification.trace_comparison import PairDifference
from app.verification.verdict import Diagnosis, PairVerdict, StrategyVerdict
from app.verification.verify_output import write_record
from performance_samples import make_sample
from test_records import make_history, make_summary

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
    write_history(path, make_history(num_epochs))
    write_summary(path, summary)
    return summary


def write_comparison(path):
    strategies = ("single", "manual", "mirrored")
    config = Config.of("compare", strategies=strategies)
    write_config(path, config, strategy=",".join(strategies))
    summaries = [
        write_training(path / name, strategy=name, weights_sha256=digest * 32)
        for name, digest in zip(strategies, ("aa", "bb", "bb"), strict=True)
    ]
    apart, same = WeightDifference("logits/kernel", 0.25, 0.5), WeightDifference("", 0.0, 0.0)
    verdicts = [
        WeightVerdict(("single", "manual"), 40, apart, "So."),
        WeightVerdict(("manual", "mirrored"), 40, same, "Not so."),
    ]
    write_json(path / "compare.json", {"shown": describe(config, summaries, verdicts).to_record()})


def write_verification(path, *, fault=None):
    """Writes the files of `verify` for two steps of two strategies; one has a fault."""
    config = Config.of("verify", strategies=("manual", "mirrored"), steps=2, inject=fault)
    write_config(path, config, command="verify")

    def measured(share, absolute32):
        return [
            Measurement(step, kind, "logits/kernel", replica, 1e-9, 1e-7, 3, absolute32, share, 1.0)
            for step in (1, 2)
            for kind in ("gradients", "sums", "weights")
            for replica in (0, 1)
        ]

    false = Measurement(1, "sums", "conv1/kernel", 1, 0.125, 0.5, 9, 0.125, 5e7, 1.0)
    split = Split(2, 2, 2)
    strategy_verdicts = {
        "manual": StrategyVerdict(
            "manual",
            measured(0.25, 1e-9) + [false] * bool(fault),
            false if fault else None,
            Diagnosis("lost_gradient", "the sum is without replica 1") if fault else None,
            None,
            split,
        ),
        "mirrored": StrategyVerdict("mirrored", measured(0.5, 0.0), None, None, None, split),
    }
    counts = len(CPUS), len(CPUS), len(CPUS)
    run = Recorded(
        *(CPUS, *counts, False, [1, 1], True, "synthetic", "cc" * 32, 0.2, 100),
        *(False, False, None, [], VERSIONS),
    )
    apart = [
        PairDifference(step, "weights", "logits/kernel", 0, 3e-9 * step, 1e-7, 4, not fault)
        for step in (1, 2)
    ]
    verdict = PairVerdict.of(strategy_verdicts["manual"], strategy_verdicts["mirrored"], apart)
    write_record(path, config, dict.fromkeys(strategy_verdicts, run), strategy_verdicts, [verdict])


CHECKS = {
    "start": "weights on every replica", "forward": "predictions", "clipping": "the clipped sum",
    "update": "weights after the step",
}  # fmt: skip
CLIPPED = {
    "stage": "clipping", "status": "fault", "cause": "clipped_before_the_sum",
    "text": "clipnorm=0.1 is applied on each replica", "steps": ["step 1", "step 2", "step 3"],
    "replicas": [], "tensors": ["dense/kernel", "dense/bias"], "distance": 0.47, "allowed": 1e-5,
    "remedy": "clip after the sum: `all_reduce` first",
}  # fmt: skip
LOCAL = {
    "stage": "forward", "status": "by design", "cause": "local_statistics",
    "text": "bn normalises the examples of each replica", "steps": ["step 2"], "replicas": [0, 1],
    "tensors": [f"bn_{i}" for i in range(15)], "distance": 0.0, "allowed": 0.0, "remedy": "none",
}  # fmt: skip


def case_run(*findings, replicas=2, **changes):
    """Returns the entry of `verify.json` for a strategy of a case."""
    stages = dict.fromkeys(CHECKS, "clean") | {f["stage"]: f["status"] for f in findings}
    if replicas == 1:
        del stages["start"]
    return {
        "reference": "training that my_case.py defines on one device",
        "devices": CPUS[:replicas], "simulated_devices": replicas > 1,
        "steps": [*(f"step {i}" for i in (1, 2, 3)), "an evaluation"], "stages": stages,
        "checks": CHECKS, "findings": list(findings), "tolerance": "float64",
        "model": "network", "versions": VERSIONS, **changes,
    }  # fmt: skip


def write_case(path, runs=None, **changes):
    """Writes the files of `verify --case`: a clean strategy, one by design, one with a fault."""
    runs = runs or {
        "single": case_run(replicas=1),
        "mirrored": case_run(LOCAL),
        "keras_fit": case_run(LOCAL, CLIPPED),
    }
    record = {
        "command": "verify", "case": "folder/my_case.py", "model": "network",
        "global_batch_size": 8, "seed": 0, "strategies": runs,
        "setup": {"model": f"{changes.get('model', 'network')}, batch 8, seed 0, 2 simulated CPUs"},
        "comparison": "Each stage of each step, compared with one device", **changes,
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    config = {"written_by": "lockstep", "command": "verify", "case": record["case"]}
    write_json(path / "config.json", {**config, "strategy": ",".join(runs)})
    write_json(path / "verify.json", {**record, "shown": describe_case(record).to_record()})
    return record


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
