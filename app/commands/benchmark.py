"""`benchmark`: measures the throughput of strategies in turn, with intervals.

Each strategy has a process of its own, which sleeps while the others are timed. Every other round
is in reverse order, so that other work on the machine slows all strategies alike.
"""

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from app import console
from app.children import Channel, Child
from app.options import Config
from app.progress import Progress
from app.records.files import write_json
from app.records.history import TIMING_CAVEAT, RunMetadata
from app.records.run_directory import default_out, named_path, open_command_directory
from app.report.page import REPORT_FILE, interval_cells, write_report

BENCHMARK_FILE = "benchmark.json"
NUM_ROUNDS = 10  # At least 5: of fewer rounds, the interval would be too narrow.
BLOCK_SEC = 2.0  # Of the steps that are timed together: averages out the scheduler's time slices.
_WARM_UP_STEPS = 3


@dataclasses.dataclass
class Case:
    """A strategy, and its measurements; item i of each list is of round i."""

    strategy: str
    facts: RunMetadata
    images_per_sec: list[float] = dataclasses.field(default_factory=list)
    sec: list[float] = dataclasses.field(default_factory=list)  # Of a step.


def run(config: Config) -> None:
    """Measures every strategy, prints a table, and writes the numbers and a page."""
    path = named_path(config.output.out or default_out("benchmark", config.training.model))
    overwrite = config.output.overwrite
    with open_command_directory(path, config.result_fields(), overwrite=overwrite) as directory:
        timed = ", ".join(config.strategies)
        console.say(f"{timed}: {NUM_ROUNDS} rounds, each strategy in a process of its own")
        with Progress(1) as progress:
            cases = measure(config, progress)
        directory.start(overwrite=overwrite)  # Only after each strategy has been trained.
        record = benchmark_record(config, cases)
        print_cases(record)
        write_json(path / BENCHMARK_FILE, record)
        write_report([path], path / REPORT_FILE)
        console.say(f"saved in {path}: {BENCHMARK_FILE}, {REPORT_FILE}")


def measure(config: Config, progress: Progress) -> list[Case]:
    """Times a block of steps of each strategy in each round; shows the progress."""
    with contextlib.ExitStack() as stack:
        cases, order = [], []
        for number, strategy in enumerate(config.strategies, start=1):
            progress.start(f"preparing {number} of {len(config.strategies)}: {strategy}")
            child = stack.enter_context(Child(_time_on_demand, config.for_training(strategy)))
            cases.append(Case(strategy, _receive(child, progress)))
            order.append((child, cases[-1]))
        progress.start("measuring", total=NUM_ROUNDS * len(cases))
        for done in range(NUM_ROUNDS):
            for number, (child, case) in enumerate(order, start=1):
                child.send("measure")
                images_per_sec, sec = _receive(child, progress)
                case.images_per_sec.append(images_per_sec)
                case.sec.append(sec)
                progress.message(("step", done * len(cases) + number))
            order.reverse()
        return cases


def _receive(child: Child, progress: Progress) -> Any:
    """Returns the next answer of a process; shows the warnings before it."""
    while True:
        kind, message = child.receive()[1]
        if kind == "answer":
            return message
        progress.message((kind, message))


def _time_on_demand(channel: Channel, config: Config) -> None:
    """Sends `RunMetadata`, then for each message images per second and seconds per step.

    The parent kills the process, because deleting an iterator of MirroredStrategy can take 30 s.
    """
    console.forward_warnings(lambda text: channel.send(("warning", text)))
    from app.devices import setup

    devices = setup.set_up(config)  # Before TensorFlow is imported.
    from app.data.fashion_mnist import load_data
    from app.training.build import TrainingRun
    from app.training.checks import check_all_reduce

    training = TrainingRun(config, devices, load_data(config))
    strategy = training.strategy
    check_all_reduce(strategy)
    iterator = strategy.distribute(training.batches())

    def time_block(num_steps: int) -> tuple[float, float]:
        start = time.perf_counter()
        totals = strategy.train_steps(iterator, num_steps)  # Numbers: the last step is done.
        sec = time.perf_counter() - start
        return totals.examples / sec, sec / num_steps

    time_block(_WARM_UP_STEPS)  # Compiles the step.
    num_steps = max(1, round(BLOCK_SEC / time_block(_WARM_UP_STEPS)[1]))
    channel.send(("answer", training.metadata()))
    while channel.receive():
        channel.send(("answer", time_block(num_steps)))


def interval(values: Sequence[float], base: Sequence[float] | None = None) -> dict[str, float]:
    """Returns the "median" of some values, or its ratio to that of `base`, with a 95 % interval.

    Item i of both is of round i. The bootstrap draws whole rounds, because other work on the
    machine slows down everything in a round.
    """

    def statistic(drawn: np.ndarray) -> np.ndarray:
        below = 1.0 if base is None else np.median(np.asarray(base)[drawn], axis=-1)
        return np.median(np.asarray(values)[drawn], axis=-1) / below

    rounds = np.arange(len(values))
    drawn = np.random.default_rng(0).choice(rounds, (2000, len(rounds)))
    low, high = np.quantile(statistic(drawn), [0.025, 0.975])
    return {"median": float(statistic(rounds)), "low": float(low), "high": float(high)}


def benchmark_record(config: Config, cases: Sequence[Case]) -> dict[str, Any]:
    """Returns the content of `benchmark.json`; speed-ups are against `single` if it was timed."""
    base = next((case.images_per_sec for case in cases if case.strategy == "single"), None)
    timed, facts = [], [case.facts for case in cases]
    for case in cases:
        is_base = base is None or case.strategy == "single"
        timed.append({
            "strategy": case.strategy,
            "num_devices": len(case.facts.devices),
            "images_per_sec": interval(case.images_per_sec),
            "speedup": None if is_base else interval(case.images_per_sec, base),
            "sec": case.sec,
        })  # fmt: skip
    names = ("model", "recipe", "global_batch_size", "precision")
    return {
        "command": "benchmark",
        "cases": timed,
        "facts": {
            **{name: getattr(config.training, name) for name in names},
            "dataset": facts[0].dataset,
            "devices": max((each.devices for each in facts), key=len),
            "simulated_devices": any(each.simulated_devices for each in facts),
            "rounds": len(cases[0].sec),
            "versions": facts[0].versions,
        },
    }


def print_cases(record: dict[str, Any]) -> None:
    """Prints the table of a benchmark, with what to keep in mind in its title."""
    facts, rows = record["facts"], []
    caveat = f" ({TIMING_CAVEAT})" if facts["simulated_devices"] else ""
    title = (
        f"{facts['model']}, recipe {facts['recipe']}, batch {facts['global_batch_size']},"
        f" {facts['precision']}, {facts['dataset']}: medians of {facts['rounds']} rounds with 95 %"
        f" intervals{caveat}"
    )
    header = ["", "devices", "images/s", "interval", "ms a step", "speed-up", "interval"]
    for case in record["cases"]:
        rows.append([
            case["strategy"],
            str(case["num_devices"]),
            *interval_cells(case["images_per_sec"], ",.0f"),
            f"{1e3 * np.median(case['sec']):.1f}",
            *interval_cells(case["speedup"], ".3f"),
        ])  # fmt: skip
    console.print_table(title, header, rows)
