"""Runs `verify --strategies`: records and checks each strategy, and compares pairs."""

import contextlib
import functools
import importlib
import itertools
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence

from app.options import Config
from app.options.names import FRAMEWORKS, MULTI_WORKER, SINGLE
from app.options.rules import faulty_strategy
from app.records.caveats import DATASET_CAVEATS, injected_fault_caveat
from app.records.files import io_errors_as, publish, temporary_path
from app.records.run_directory import (
    RunDirectory,
    default_out,
    named_path,
    open_command_directory,
)
from app.runtime import console
from app.runtime.errors import DivergedError
from app.runtime.processes import call_in_child_process, start_tensorflow_server
from app.runtime.progress_bar import StepProgress
from app.verification import output
from app.verification.comparison import compare_traces, normalised_by
from app.verification.frameworks import (
    find_interpreters,
    record_framework,
    write_training_files,
)
from app.verification.output import Pair, Run
from app.verification.recording import (
    Checked,
    check_recorded,
    record_and_check,
    record_on_workers,
)
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
        with traces_directory(config, run_directory) as traces:
            with io_errors_as(traces):
                traces.mkdir()
            checked = _verify_each(config, traces, interpreters)
            loaded = {name: trace_file.load(traces / f"{name}.npz") for name in checked}
            wrong = {
                name for name, each in checked.items()
                if any(finding.detail != "slow_replica" for finding in each.run.verdict.faults)
            }  # fmt: skip
            pairs = [
                compare_traces((a, b), (loaded[a], loaded[b]), has_fault=bool(wrong & {a, b}))
                for a, b in itertools.combinations(checked, 2)
            ]
        _report(config, path, checked, pairs)
    return {name: each.run for name, each in checked.items()}


@contextlib.contextmanager
def traces_directory(config: Config, run_directory: RunDirectory) -> Iterator[pathlib.Path]:
    """Returns the path of a directory for traces, which are published at the end if asked for.

    Earlier results stay in the run directory until the `with` block ends without an error.
    """
    traces = temporary_path(run_directory.path / "traces")
    try:
        yield traces
        run_directory.start(overwrite=config.output.overwrite)
        run_directory.remove("traces")
        if config.verification.keep_traces:
            publish(traces, run_directory.path / "traces")
    finally:
        shutil.rmtree(traces, ignore_errors=True)


def _verify_each(
    config: Config, traces: pathlib.Path, interpreters: Mapping[str, str]
) -> dict[str, Checked]:
    """Records and checks one strategy after another, so that the steps of each are timed alone.

    Returns:
        Strategy → result, in the order of the options.
    """
    names, steps = config.distribution.strategies, config.verification.steps
    checked, folder = dict[str, Checked](), traces / "frameworks"
    # The messages of the process that imports TensorFlow cannot be shown.
    if has_server := config.output.verbosity < 0:
        start_tensorflow_server()
    importlib.import_module("app.report.verification_plot")  # Meanwhile: matplotlib takes a while.
    with StepProgress(2 * steps) as progress:
        call = functools.partial(
            call_in_child_process, on_message=progress.message, has_tensorflow=has_server
        )
        if interpreters:
            folder.mkdir()
            single = config.for_training(SINGLE, inject=None)
            files = call(write_training_files, single, steps, folder)
        for name in sorted(names, key=lambda name: name == SINGLE):
            inject = config.verification.inject if name == config.faulty_strategy else None
            child, path = config.for_training(name, inject=inject), traces / f"{name}.npz"
            if name not in (*FRAMEWORKS, MULTI_WORKER):
                weights: Sequence[int] = ()
                if name == SINGLE:
                    others = [trace_file.load(traces / f"{other}.npz").about for other in checked]
                    weights = shards_of_single(others)
                if weights:
                    num = len(weights)
                    child = config.for_training(name, inject=inject, accumulate_steps=num)
                progress.start(f"recording and checking {name}")
                checked[name] = call(record_and_check, child, steps, path, weights)
                continue
            progress.start(f"recording {name}")
            if name == MULTI_WORKER:
                num_workers = config.cluster.num_workers or 1
                recorded = record_on_workers(progress.message, child, steps, path, num_workers)
            else:
                recorded = record_framework(
                    name, interpreters[name], config, files, path, progress.message
                )
            progress.start(f"checking {name}")
            checked[name] = call(check_recorded, config.on_one_machine(), name, recorded, path)
    shutil.rmtree(folder, ignore_errors=True)  # It has copies of the images.
    return {name: checked[name] for name in names}


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


def _report(
    config: Config, path: pathlib.Path, checked: Mapping[str, Checked], pairs: Sequence[Pair]
) -> None:
    """Prints and writes the results."""
    training, runs = config.training, {name: each.run for name, each in checked.items()}
    fault, about_data = config.verification.fault, next(iter(checked.values())).facts
    facts = {
        "injected_fault": str(fault or ""),
        "model": training.model,
        "recipe": training.recipe,
        "global_batch_size": training.global_batch_size,
        "seed": training.seed,
        "batch_norm": config.distribution.batch_norm,
        "precision": training.precision,
        "tf32": False,
        **about_data,
    }
    num_devices, dataset = max(len(run.devices) for run in runs.values()), about_data["dataset"]
    setup = (
        f"{training.model} on {dataset}, recipe {training.recipe}, batch"
        f" {training.global_batch_size}, learning rate {about_data['learning_rate']:g}, seed"
        f" {training.seed}, {console.count(num_devices, 'device')}, {training.precision},"
        " TF32 off"
    )
    caveats = []
    if fault:
        caveats.append(injected_fault_caveat(f"{fault} in {faulty_strategy(config)}"))
        if not any(run.verdict.faults for run in runs.values()):
            text = f"the injected fault was not found: {fault} makes too little difference here"
            caveats.append(text)
    if dataset in DATASET_CAVEATS:
        caveats.append(DATASET_CAVEATS[dataset])
    output.report(
        path, runs, facts=facts, setup={"training": setup}, pairs=pairs, caveats=caveats,
        also=["traces"] if config.verification.keep_traces else [],
    )  # fmt: skip
    for name, each in checked.items():
        if each.diverged_step:
            raise DivergedError(
                f"the training diverges: a value of {name} is not finite after step"
                f" {each.diverged_step}, and every step is right; use a smaller --learning_rate, or"
                " fewer --steps"
            )
    output.require_verified(path, runs)
