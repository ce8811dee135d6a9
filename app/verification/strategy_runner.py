"""Runs `verify --strategies`: records each strategy, checks every step, and compares pairs."""

import dataclasses
import itertools
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from app.options import Config
from app.options.names import FRAMEWORKS, MULTI_WORKER, SINGLE
from app.records.caveats import DATASET_CAVEATS, injected_fault_caveat
from app.records.files import io_errors_as, publish, temporary_path
from app.records.run_directory import default_out, named_path, open_command_directory
from app.runtime import console
from app.runtime.errors import DivergedError
from app.runtime.progress_bar import StepProgress
from app.verification import output, tasks
from app.verification.difference import Difference
from app.verification.frameworks.framework_program import find_interpreters
from app.verification.frameworks.framework_recording import FrameworkRecorder
from app.verification.recorded import Checked, Recorded
from app.verification.run import BY_DESIGN, DIFFERENT, EQUAL, IDENTICAL, Pair, Run
from app.verification.straggler import find_straggler
from app.verification.strategy_processes import StrategyProcesses
from lockstep import trace_file
from lockstep.arithmetic import dense, same_bits
from lockstep.trace import WEIGHT, Array, Trace
from lockstep.verdict import FAULT, Finding, Verdict

Compared = dict[tuple[str, str], "Pair"]  # For each pair of strategies.

_OF_SHARDS = ("data", "y_pred", "loss", "raw", "own_before", "own_after")
_OF_COPIES = ("before", "sums", "after")


def verify_strategies(config: Config) -> dict[str, Run]:
    """Records each strategy in a separate process, checks every step and reports the verdicts.

    Returns:
        Strategy → result.

    Raises:
        MismatchError: a step differs from the reference, or a replica is a straggler.
        DivergedError: every step is right, and the training diverges.
    """
    interpreters = find_interpreters([n for n in config.distribution.strategies if n in FRAMEWORKS])
    path = named_path(config.output.out or default_out("verify", config.training.model))
    fields = {
        "command": "verify",
        **config.result_fields(),
        "strategy": ",".join(config.distribution.strategies),
        "num_replicas": config.num_devices_of_all_workers,  # For data parallelism.
        "steps": config.verification.steps,
    }
    with open_command_directory(path, fields, overwrite=config.output.overwrite) as run_directory:
        # The directory stays unchanged until there is a result to write.
        traces = temporary_path(path / "traces")
        try:
            with io_errors_as(traces):
                traces.mkdir()
            verification = _Verification(
                config, traces, FrameworkRecorder(config, interpreters, traces)
            )
            verification.run()
            run_directory.start(overwrite=config.output.overwrite)
            run_directory.remove("traces")
            if config.verification.keep_traces:
                publish(traces, run_directory.path / "traces")
        finally:
            shutil.rmtree(traces, ignore_errors=True)
        return verification.report(run_directory.path)


class _Verification:
    """The recordings of all strategies, their pairs and their verdicts.

    Args:
        config: options of the command.
        traces: directory of the traces.
        frameworks: records the trainings of other frameworks.
    """

    def __init__(self, config: Config, traces: pathlib.Path, frameworks: FrameworkRecorder):
        self._config, self._traces, self._frameworks = config, traces, frameworks
        self._names = config.distribution.strategies
        self._recorded: dict[str, Recorded] = {}
        self._pairs: dict[tuple[str, str], Pair] = {}
        self._checked: dict[str, Checked] = {}
        self._stands_for: dict[str, str] = {}

    def run(self) -> None:
        """Records and checks all strategies."""
        progress = StepProgress(self._config.verification.steps)
        with progress, StrategyProcesses(self._config, self._traces, progress) as processes:
            self._record(processes, progress)
            if SINGLE in self._names:  # While the others are compared and checked.
                processes.record(SINGLE, *self._recording(SINGLE))
            self._compare()
            self._check_distinct(processes)
            self._recorded |= processes.recorded()
            self._compare()
            self._check_distinct(processes)
            self._checked = processes.checked()
        self._recorded = {name: self._recorded[name] for name in self._names}

    def _record(self, processes: StrategyProcesses, progress: StepProgress) -> None:
        """Records every strategy except `single`, which depends on the others."""
        steps = self._config.verification.steps
        for name in self._names:
            if name in FRAMEWORKS:
                self._recorded |= processes.recorded()  # Running both would slow them down.
                progress.start(f"recording {name}")
                path = self._traces / f"{name}.npz"
                self._recorded[name] = self._frameworks.record(name, path, progress.message)
            elif name == MULTI_WORKER:
                self._recorded |= processes.recorded()
                progress.start(f"recording {name}")
                num_workers = self._config.cluster.num_workers or 1
                self._recorded[name] = tasks.record_on_workers(
                    progress.message, self._recording(name)[0], steps,
                    self._traces / f"{name}.npz", num_workers,
                )  # fmt: skip
            elif name != SINGLE:
                processes.record(name, *self._recording(name))
        self._frameworks.remove_files()
        self._recorded |= processes.recorded()

    def _recording(self, name: str) -> tuple[Config, tuple[int, ...]]:
        """Returns the configuration of a recording, and the sizes of its shards if they differ.

        `single` comes last. With BatchNorm, the number of shards is part of the training: `single`
        then trains on as many shards as the others, one after another. With --batch_norm=sync, and
        if all other strategies have one shard, it is ordinary training.
        """
        config = self._config
        inject = config.verification.inject if name == config.faulty_strategy else None
        weights = [
            run.shard_weights
            for other, run in self._recorded.items()
            if run.has_batch_norm
            and len(run.about.shards) > 1
            and config.for_training(other, inject=None).distribution.batch_norm == "average"
        ]
        if name == SINGLE and weights:
            num = len(weights[0])
            return config.for_training(name, inject=inject, accumulate_steps=num), weights[0]
        return config.for_training(name, inject=inject), ()

    def _load(self, name: str) -> Trace:
        return trace_file.load(self._traces / f"{name}.npz")

    def _compare(self) -> None:
        """Compares all pairs of recorded strategies that have not been compared."""
        for names in itertools.combinations(self._names, 2):
            if names not in self._pairs and self._recorded.keys() >= set(names):
                traces = self._load(names[0]), self._load(names[1])
                self._pairs[names] = _compare(names, traces, [self._recorded[n] for n in names])

    def _check_distinct(self, processes: StrategyProcesses) -> None:
        """Starts the check of each trace; bitwise identical traces are checked once."""
        for name, run in self._recorded.items():
            same = [
                first
                for first, of in self._stands_for.items()
                if first == of
                and first != name
                and self._recorded[first].about.shards == run.about.shards
                and self._recorded[first].about.num_copies == run.about.num_copies
                and any(
                    set(names) == {first, name} and pair.outcome == IDENTICAL
                    for names, pair in self._pairs.items()
                )
            ]
            self._stands_for.setdefault(name, same[0] if same else name)
            if self._stands_for[name] == name:
                processes.check(name, self._traces / f"{name}.npz")

    def report(self, path: pathlib.Path) -> dict[str, Run]:
        """Prints and writes the results; returns them."""
        config, runs = self._config, {name: self._run(name) for name in self._names}
        pairs = [
            dataclasses.replace(pair, outcome=DIFFERENT)
            if pair.outcome != IDENTICAL and not all(_is_right(runs[name]) for name in names)
            else pair
            for names, pair in self._pairs.items()
        ]
        first = next(iter(self._recorded.values()))
        facts = {
            "injected_fault": str(config.verification.fault or ""),
            "model": config.training.model,
            "recipe": config.training.recipe,
            "global_batch_size": config.training.global_batch_size,
            "learning_rate": first.learning_rate,
            "seed": config.training.seed,
            "batch_norm": config.distribution.batch_norm,
            "dataset": first.dataset,
            "dataset_sha256": first.dataset_sha256,
            "num_train_examples": first.num_train_examples,
            "precision": config.training.precision,
            "tf32": False,
        }
        order = {names: i for i, names in enumerate(itertools.combinations(self._names, 2))}
        output.report(
            path, runs, facts=facts, setup={"training": self._setup(first)},
            pairs=sorted(pairs, key=lambda pair: order[pair.names]),
            caveats=self._caveats(first, runs),
            also=["traces"] if config.verification.keep_traces else [],
        )  # fmt: skip
        for name, run in self._recorded.items():
            if run.diverged_step:
                raise DivergedError(
                    f"the training diverges: a value of {name} is not finite after step"
                    f" {run.diverged_step}, and every step is right; use a smaller"
                    " --learning_rate, or fewer --steps"
                )
        return runs

    def _run(self, name: str) -> Run:
        """Returns the result of a strategy."""
        recorded, about = self._recorded[name], self._recorded[name].about
        checked = self._checked[self._stands_for[name]]
        verdict = dataclasses.replace(checked.verdict, name=name)
        if finding := _straggler(recorded, verdict):
            verdict = dataclasses.replace(
                verdict, findings=(*verdict.findings, finding)
            )  # fmt: skip
        texts = []
        if name == SINGLE and checked.effect_of_shards is not None:
            texts.append(
                f"one device, with BatchNorm over {len(about.shards)} shards one after another, as"
                " replicas and micro-batches have it (--batch_norm=average); over the whole batch,"
                " as `train --strategy=single` has it, the first gradient is"
                f" {checked.effect_of_shards:.1%} apart: another training by design, not a fault"
            )
        elif not len(about.shards) == about.num_replicas == len(recorded.devices):
            devices = console.count(len(recorded.devices), "device")
            texts.append(f"{recorded.describe()} on {devices}")
        if recorded.skipped_steps:
            steps = ", ".join(map(str, recorded.skipped_steps))
            texts.append(
                f"skipped {console.count(len(recorded.skipped_steps), 'step')}, as a gradient"
                f" overflowed in float16 ({steps}); others may skip other steps"
            )
        return Run(
            verdict,
            devices=recorded.devices,
            simulated_devices=recorded.simulated_devices,
            versions=recorded.versions,
            about="; ".join(texts),
            facts={
                "num_shards": len(about.shards) or about.num_replicas,
                "num_copies": about.num_copies,
                "shard_weights": list(recorded.shard_weights),
                "syncs_batch_norm": about.syncs_batch_norm,
                "effect_of_shards": checked.effect_of_shards,
                "skipped_steps": recorded.skipped_steps,
                "send_sec": recorded.send_sec,
            },
        )

    def _setup(self, first: Recorded) -> str:
        """Returns the settings of the training."""
        training = self._config.training
        num_devices = max(len(run.devices) for run in self._recorded.values())
        return (
            f"{training.model} on {first.dataset}, recipe {training.recipe}, batch"
            f" {training.global_batch_size}, learning rate {first.learning_rate:g}, seed"
            f" {training.seed}, {console.count(num_devices, 'device')}, {training.precision},"
            " TF32 off"
        )

    def _caveats(self, first: Recorded, runs: Mapping[str, Run]) -> list[str]:
        fault, caveats = self._config.verification.fault, []
        if fault:
            caveats.append(injected_fault_caveat(str(fault)))
            if all(run.verdict.ok for run in runs.values()):
                caveats.append(
                    f"the injected fault was not found: {fault} makes too little difference here"
                )
        if first.dataset in DATASET_CAVEATS:
            caveats.append(DATASET_CAVEATS[first.dataset])
        return caveats


def _is_right(run: Run) -> bool:
    """Returns whether the numbers of a training are right, even if a replica is slow."""
    return all(finding.cause == "slow_replica" for finding in run.verdict.faults)


def _straggler(recorded: Recorded, verdict: Verdict) -> Finding | None:
    """Returns the finding about a replica that all others wait for; None without one."""
    late = find_straggler(recorded.send_sec, recorded.replica_weights)
    if late is None:
        return None
    text = (
        f"it sends its gradients {1000 * late.wait_sec:.0f} ms after all others, which took"
        f" {1000 * late.work_sec:.0f} ms, and they wait for it; the numbers are right"
    )
    items = (f"replica {late.replica_id}",)
    return Finding("time", FAULT, "slow_replica", text, verdict.steps, items)


def _compare(
    names: tuple[str, str], traces: tuple[Trace, Trace], recorded: Sequence[Recorded]
) -> Pair:
    """Compares all arrays that two trainings have in common.

    With other numbers of shards, these are the arrays of the copies.
    """
    first, second = traces
    by_shard = first.about.shards == second.about.shards
    kinds = (*_OF_SHARDS, *_OF_COPIES) if by_shard else _OF_COPIES
    is_same = all(
        _have_same_bits(first, second, position, kind)
        for position in range(len(first.steps))
        for kind in kinds
    )
    if is_same:
        return Pair(names, IDENTICAL)
    worst, where = _farthest_in_the_end(first, second)
    apart: dict[str, Any] = {"absolute": worst.absolute, "relative": worst.relative, "where": where}
    if len({run.normalised_by for run in recorded}) == 1:
        return Pair(names, EQUAL, **apart)
    how = [_normalised(run) for run in recorded]
    why = (
        f"{' and '.join(names)} are two trainings by design, not by a fault: BatchNorm normalises"
        f" {how[0]} in {names[0]} and {how[1]} in {names[1]}; the first gradients are"
        f" {_first_sums_apart(first, second):.1%} apart"
    )
    return Pair(names, BY_DESIGN, **apart, why=why)


def _have_same_bits(first: Trace, second: Trace, position: int, kind: str) -> bool:
    """Returns whether both have the same arrays of a kind; copies are also those of the first."""
    pairs = itertools.zip_longest(first.items(kind), second.items(kind), fillvalue=0)
    for a, b in pairs:
        own, other = first.arrays(position, kind, a), second.arrays(position, kind, b)
        if own is None or other is None:
            if own is not other:
                return False
            continue
        if len(own) != len(other):
            return False
        for x, y in zip(own, other, strict=True):
            if (x is None) != (y is None) or (x is not None and not same_bits(x, y)):
                return False
    return True


def _farthest_in_the_end(first: Trace, second: Trace) -> tuple[Difference, str]:
    """Returns the largest difference of a weight after the last step, and its name."""
    last = len(first.steps) - 1
    ends = [_ends(trace, last) for trace in (first, second)]
    found = [
        (Difference.between(ends[0][name], ends[1][name]), f"weights, {name}") for name in ends[0]
    ]
    return max(found, key=lambda pair: (np.isnan(pair[0].absolute), pair[0].absolute))


def _ends(trace: Trace, position: int) -> dict[str, Array]:
    named = trace.named(position, "after", 0) or {}
    return {name: array for name, array in named.items() if trace.kinds[name] == WEIGHT}


def _first_sums_apart(first: Trace, second: Trace) -> float:
    """Returns the relative difference of the summed gradients of the first step."""
    one, two = (trace.named(0, "sums", 0) or {} for trace in (first, second))
    squares = [np.sum((dense(one[n]) - dense(two[n])) ** 2) for n in one]
    return float(np.sqrt(sum(squares) / sum(np.sum(dense(g) ** 2) for g in one.values())))


def _normalised(run: Recorded) -> str:
    """Returns the parts that BatchNorm normalises."""
    weights = run.normalised_by
    if len(weights) == 1:
        return "the whole batch"
    shares = f" of {':'.join(map(str, weights))}" if len(set(weights)) > 1 else ""
    return f"each of {len(weights)} shards{shares}"
