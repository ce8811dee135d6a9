"""Runs `verify --strategies`: records and checks each strategy, and compares pairs."""

import concurrent.futures
import contextlib
import functools
import importlib
import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from app.data.data_sources import FILES, find_data_source
from app.data.dataset_loader import load_data
from app.devices.tensorflow_settings import import_tensorflow
from app.options import Config
from app.options.names import FRAMEWORKS, MULTI_WORKER, SINGLE
from app.options.rules import faulty_strategy
from app.records.caveats import DATASET_CAVEATS, injected_fault_caveat
from app.records.files import io_errors_as
from app.runtime import console
from app.runtime.errors import DataError
from app.runtime.processes import Conversation, call_function, prepared_calls
from app.runtime.progress_bar import Progress
from app.verification.comparison import compare_traces, normalised_by
from app.verification.frameworks import (
    find_interpreters,
    record_framework,
    temporary_folder,
    write_training_files,
)
from app.verification.output import Pair, Results, Run, verify_in_directory
from app.verification.recording import RECORDED, Checked, check_training, record_on_workers
from lockstep.data import file as trace_file
from lockstep.data.trace import About


def verify_strategies(config: Config) -> dict[str, Run]:
    """Records and checks each strategy in a separate process, and reports the verdicts.

    Returns:
        Strategy → result.

    Raises:
        MismatchError: a step differs from the reference, or a replica is a straggler.
        DivergedError: every step is right, and the training diverges.
    """
    interpreters = find_interpreters(config.strategies)
    fields = {**config.result_fields(), "steps": config.verification.steps}

    def verify(traces: pathlib.Path) -> Results:
        with io_errors_as(traces):
            traces.mkdir()
        runs = _verify_each(config, traces, interpreters)
        return _results(config, runs, _compare_each(runs, traces))

    return verify_in_directory(config, config.training.model, fields, verify)


def _verify_each(
    config: Config, traces: pathlib.Path, interpreters: Mapping[str, str]
) -> dict[str, Run]:
    """Records and checks each strategy; one is checked while the next is built and traced.

    The steps of each are timed alone.

    Returns:
        Strategy → result, in the order of the options.
    """
    names, num_steps = config.distribution.strategies, config.verification.steps
    runs, checking = dict[str, Run](), dict[str, Conversation]()
    faulty = faulty_strategy(config)
    prepare = functools.partial(_prepare, config)
    with contextlib.ExitStack() as stack:
        start = stack.enter_context(prepared_calls(prepare))
        progress = stack.enter_context(Progress(2 * num_steps))
        folder = stack.enter_context(temporary_folder(traces / "files"))

        def finish() -> None:
            """Waits until the strategy that is being checked is."""
            while checking:
                name, process = checking.popitem()
                runs[name] = process.result(progress.message)

        def checked() -> list[Checked]:
            return [(traces / f"{name}.npz", run.exact) for name, run in runs.items()]

        if interpreters:
            single = config.for_training(SINGLE, inject=None)
            writes = start(call_function, write_training_files, single, num_steps, folder)
            files = writes.result(progress.message)
        for name in sorted(names, key=lambda name: name == SINGLE):
            inject = config.verification.inject if name == faulty else None
            child, path = config.for_training(name, inject=inject), traces / f"{name}.npz"
            if name not in (*FRAMEWORKS, MULTI_WORKER):
                weights: Sequence[int] = ()
                if name == SINGLE:
                    weights = shards_of_single(
                        trace_file.load(traces / f"{other}.npz").about
                        for other in (*runs, *checking)
                    )
                if weights:
                    num = len(weights)
                    child = config.for_training(name, inject=inject, accumulate_steps=num)
                check = functools.partial(check_training, shard_weights=weights)
                process = start(check, child, name, path, num_steps)
                importlib.import_module("app.report.verification_plot")  # Takes a while.
                finish()
                progress.start(f"recording and checking {name}")
                process.send(checked())
                while (message := process.receive()[1]) != RECORDED:
                    progress.message(message)
            else:
                finish()
                progress.start(f"recording {name}")
                if name == MULTI_WORKER:
                    recorded = record_on_workers(progress.message, child, num_steps, path)
                else:
                    python = interpreters[name]
                    recorded = record_framework(name, python, config, files, path, progress.message)
                progress.start(f"checking {name}")
                check = functools.partial(check_training, recorded=recorded)
                process = start(check, config.on_one_machine(), name, path, num_steps)
                process.send(checked())
            checking[name] = process
        finish()
    return {name: runs[name] for name in names}


def _prepare(config: Config) -> dict[str, Any]:
    """Imports what each training needs; returns the data for `set_up`, if it is in files."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # Neither waits for the other.
        loading = pool.submit(_load_files, config)
        import_tensorflow(config.output.verbosity)
        for module in ("app.verification.recorder", "app.verification.strategy_oracle"):
            importlib.import_module(module)
        return loading.result()


def _load_files(config: Config) -> dict[str, Any]:
    options = config.data
    if options.dataset != "synthetic" and not options.allow_unverified_data:
        with contextlib.suppress(DataError):  # Each training says what is wrong with the data.
            if find_data_source(options.data_dir).kind == FILES:
                return {"data": load_data(config)}
    return {}


def shards_of_single(others: Iterable[About]) -> tuple[int, ...]:
    """Returns the relative sizes of the shards that `single` trains on; empty for one shard.

    With BatchNorm, the number of shards is part of the training: `single` then trains on as many
    shards as the others, one after another. With --batch_norm=sync, and if all other strategies
    have one shard, it is ordinary training.

    Args:
        others: the descriptions of the traces of the other strategies.
    """
    sizes = [sizes for sizes in map(normalised_by, others) if len(sizes) > 1]
    return sizes[0] if sizes else ()


def _compare_each(runs: Mapping[str, Run], traces: pathlib.Path) -> list[Pair]:
    """Compares the traces of each pair of strategies."""
    loaded = {name: trace_file.load(traces / f"{name}.npz") for name in runs}
    wrong = {
        name
        for name, run in runs.items()
        if any(finding.detail != "slow_replica" for finding in run.verdict.faults)
    }
    return [
        compare_traces((a, b), (loaded[a], loaded[b]), has_fault=bool(wrong & {a, b}))
        for a, b in itertools.combinations(runs, 2)
    ]


def _results(config: Config, runs: Mapping[str, Run], pairs: Sequence[Pair]) -> Results:
    """Returns the results with how all strategies were trained."""
    training, fault = config.training, config.verification.fault
    of_data = next(iter(runs.values())).common_facts
    num_devices, dataset = max(len(run.devices) for run in runs.values()), of_data["dataset"]
    setup = (
        f"{training.model} on {dataset}, recipe {training.recipe}, batch"
        f" {training.global_batch_size}, learning rate {of_data['learning_rate']:g}, seed"
        f" {training.seed}, {console.count(num_devices, 'device')}, {training.precision},"
        " TF32 off"
    )
    shared = ("model", "recipe", "global_batch_size", "seed", "batch_norm", "precision")
    fields = config.result_fields()
    facts = {"injected_fault": str(fault or ""), **{name: fields[name] for name in shared}}
    facts |= {"tf32": False, **of_data}
    caveats = []
    if fault:
        caveats.append(injected_fault_caveat(f"{fault} in {faulty_strategy(config)}"))
        if not any(run.verdict.faults for run in runs.values()):
            text = f"the injected fault was not found: {fault} makes too little difference here"
            caveats.append(text)
    if dataset in DATASET_CAVEATS:
        caveats.append(DATASET_CAVEATS[dataset])
    return Results(runs, facts, {"training": setup}, pairs, caveats)
