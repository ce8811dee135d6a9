"""Runs `verify --strategies`: records and checks each strategy, and compares pairs."""

import contextlib
import contextvars
import dataclasses
import itertools
import pathlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from app.devices.gpus import has_device_file
from app.options import Config
from app.options.names import FRAMEWORKS, MULTI_WORKER, SINGLE
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
from app.runtime.processes import (
    ChildProcess,
    call_function,
    call_in_child_process,
    start_tensorflow_server,
)
from app.runtime.progress_bar import StepProgress
from app.verification import output, recording
from app.verification.comparison import compare_traces
from app.verification.frameworks import (
    find_interpreters,
    record_framework,
    write_training_files,
)
from app.verification.output import DIFFERENT, IDENTICAL, Pair, Run
from app.verification.recording import Recorded
from lockstep import trace_file
from lockstep.verdict import Verdict


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
            recorded, verdicts = _verify_all(config, traces, interpreters)
            loaded = {name: trace_file.load(traces / f"{name}.npz") for name in recorded}
            pairs = [
                compare_traces((a, b), (loaded[a], loaded[b]), (recorded[a], recorded[b]))
                for a, b in itertools.combinations(recorded, 2)
            ]
        runs = {name: _run(config, recorded[name], verdicts[name]) for name in recorded}
        _report(config, path, recorded, runs, pairs)
    return runs


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


def _verify_all(
    config: Config, traces: pathlib.Path, interpreters: Mapping[str, str]
) -> tuple[dict[str, Recorded], dict[str, Verdict]]:
    """Records and checks all strategies; returns the results in the order of the options."""
    names, steps = config.distribution.strategies, config.verification.steps
    progress, folder = StepProgress(2 * steps * len(names)), traces / "frameworks"
    with progress, _Processes(config, progress) as processes:
        if interpreters:
            folder.mkdir()
            files = call_in_child_process(
                write_training_files, config.for_training(SINGLE, inject=None), steps,
                folder, on_message=processes.message,
            )  # fmt: skip
        for name in sorted(names, key=lambda name: name == SINGLE):
            inject = config.verification.inject if name == config.faulty_strategy else None
            child, path = config.for_training(name, inject=inject), traces / f"{name}.npz"
            if name not in (*FRAMEWORKS, MULTI_WORKER):
                weights: Sequence[int] = ()
                if name == SINGLE and (weights := shards_of_single(config, processes.recorded())):
                    num = len(weights)
                    child = config.for_training(name, inject=inject, accumulate_steps=num)
                processes.start(name, recording.record_and_check, child, steps, path, weights)
                continue
            processes.verdicts()  # Running others at the same time would slow them down.
            processes.show(f"recording {name}")
            if name == MULTI_WORKER:
                num_workers = config.cluster.num_workers or 1
                run = recording.record_on_workers(
                    processes.message, child, steps, path, num_workers
                )
            else:
                run = record_framework(
                    name, interpreters[name], config, files, path, processes.message
                )
            arguments = config.on_one_machine(), run, path
            processes.start(name, recording.check_recorded, *arguments, recorded=run)
        recorded, verdicts = processes.recorded(), processes.verdicts()
    shutil.rmtree(folder, ignore_errors=True)  # It has copies of the images.
    return {n: recorded[n] for n in names}, {n: verdicts[n] for n in names}


def shards_of_single(config: Config, recorded: Mapping[str, Recorded]) -> tuple[int, ...]:
    """Returns the relative sizes of the shards that `single` trains on; empty for one shard.

    With BatchNorm, the number of shards is part of the training: `single` then trains on as many
    shards as the others, one after another. With --batch_norm=sync, and if all other strategies
    have one shard, it is ordinary training.
    """
    for name, run in recorded.items():
        child = config.for_training(name, inject=None)
        averages = child.distribution.batch_norm == "average"
        if run.has_batch_norm and len(run.about.shards) > 1 and averages:
            return run.shard_weights
    return ()


class _Processes:
    """Records and checks strategies in processes, two at a time; a context manager that ends them.

    Args:
        config: options of the command.
        progress: shows the steps of all processes together.
    """

    def __init__(self, config: Config, progress: StepProgress):
        self._progress, self._num_done, self._lock = progress, 0, threading.Lock()
        self._recorded: dict[str, Future[Recorded]] = {}
        self._verdicts: dict[str, Future[Verdict]] = {}
        # The messages of the process that imports TensorFlow cannot be shown.
        self._has_server = config.output.verbosity < 0
        # Two processes use the cores while one of them traces a graph. On GPUs each process needs
        # all of the memory, and undisturbed times to detect stragglers.
        uses_gpus = config.distribution.device != "cpu" and has_device_file()
        self._threads = ThreadPoolExecutor(1 if uses_gpus else 2)
        self._running = contextlib.ExitStack()  # Those that still run, on an error.

    def __enter__(self) -> Self:
        if self._has_server:
            start_tensorflow_server()  # Before the threads that use it.
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._running.close()
        self._threads.shutdown()

    def start(
        self,
        name: str,
        function: Callable[..., Verdict],
        *arguments: Any,
        recorded: Recorded | None = None,
    ) -> None:
        """Starts a process for a strategy; it sends what it records, unless that is given."""
        self.show(f"{'checking' if recorded else 'recording and checking'} {name}")
        self._recorded[name] = Future()
        if recorded:
            self._recorded[name].set_result(recorded)
        run = contextvars.copy_context().run
        self._verdicts[name] = self._threads.submit(run, self._call, name, function, arguments)

    def recorded(self) -> dict[str, Recorded]:
        """Waits for all recordings."""
        return {name: future.result() for name, future in self._recorded.items()}

    def verdicts(self) -> dict[str, Verdict]:
        """Waits for all checks."""
        return {name: future.result() for name, future in self._verdicts.items()}

    def show(self, what: str) -> None:
        """Shows a new task."""
        with self._lock:
            self._progress.start(what)
            self._progress.message(("step", self._num_done))

    def message(self, message: tuple[str, Any]) -> None:
        """Counts the steps of all processes, and shows warnings."""
        with self._lock:
            if message[0] == "step":
                self._num_done += 1
                message = "step", self._num_done
            self._progress.message(message)

    def _call(self, name: str, function: Callable[..., Verdict], arguments: Sequence) -> Verdict:
        """Runs in a thread, which waits for its process."""
        process = ChildProcess(call_function, function, *arguments, has_tensorflow=self._has_server)
        try:
            with process:
                self._running.callback(process.signal, signal.SIGKILL)
                while (received := process.receive())[0] == "message":
                    kind, value = received[1]
                    if kind == "recorded":
                        self._recorded[name].set_result(value)
                    else:
                        self.message((kind, value))
            return received[1]
        except BaseException as error:
            if not self._recorded[name].done():
                self._recorded[name].set_exception(error)
            raise


def _run(config: Config, recorded: Recorded, verdict: Verdict) -> Run:
    """Returns the result of a strategy."""
    about, num_devices = recorded.about, len(recorded.devices)
    num, texts = len(about.shards), []
    if recorded.name == SINGLE and num > 1:
        texts.append(
            f"one device, with BatchNorm over {num} shards one after another, as replicas and"
            " micro-batches have it (--batch_norm=average); `train --strategy=single`, with"
            " BatchNorm over the whole batch, is another training by design, not a fault"
        )
    elif not num == about.num_replicas == num_devices:
        each = f" of {num // about.num_replicas} micro-batches" if num > about.num_replicas else ""
        replicas = console.count(about.num_replicas, "replica")
        texts.append(f"{replicas}{each} on {console.count(num_devices, 'device')}")
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
            "num_shards": num or about.num_replicas,
            "num_copies": about.num_copies,
            "shard_weights": list(recorded.shard_weights),
            "syncs_batch_norm": about.syncs_batch_norm,
            "skipped_steps": recorded.skipped_steps,
            "send_sec": recorded.send_sec,
        },
    )


def _report(
    config: Config, path: pathlib.Path, recorded: Mapping[str, Recorded], runs: Mapping[str, Run],
    pairs: Sequence[Pair],
) -> None:  # fmt: skip
    """Prints and writes the results."""
    training, first = config.training, next(iter(recorded.values()))
    wrong = {
        name for name, run in runs.items()
        if any(finding.cause != "slow_replica" for finding in run.verdict.faults)
    }  # fmt: skip
    pairs = [
        dataclasses.replace(pair, outcome=DIFFERENT)
        if pair.outcome != IDENTICAL and wrong.intersection(pair.names)
        else pair
        for pair in pairs
    ]
    facts = {
        "injected_fault": str(config.verification.fault or ""),
        "model": training.model,
        "recipe": training.recipe,
        "global_batch_size": training.global_batch_size,
        "learning_rate": first.learning_rate,
        "seed": training.seed,
        "batch_norm": config.distribution.batch_norm,
        "dataset": first.dataset,
        "dataset_sha256": first.dataset_sha256,
        "num_train_examples": first.num_train_examples,
        "precision": training.precision,
        "tf32": False,
    }
    num_devices = max(len(run.devices) for run in recorded.values())
    setup = (
        f"{training.model} on {first.dataset}, recipe {training.recipe}, batch"
        f" {training.global_batch_size}, learning rate {first.learning_rate:g}, seed"
        f" {training.seed}, {console.count(num_devices, 'device')}, {training.precision},"
        " TF32 off"
    )
    caveats = []
    if fault := config.verification.fault:
        caveats.append(injected_fault_caveat(str(fault)))
        if all(run.verdict.ok for run in runs.values()):
            text = f"the injected fault was not found: {fault} makes too little difference here"
            caveats.append(text)
    if first.dataset in DATASET_CAVEATS:
        caveats.append(DATASET_CAVEATS[first.dataset])
    output.report(
        path, runs, facts=facts, setup={"training": setup}, pairs=pairs, caveats=caveats,
        also=["traces"] if config.verification.keep_traces else [],
    )  # fmt: skip
    for name, run in recorded.items():
        if run.diverged_step:
            raise DivergedError(
                f"the training diverges: a value of {name} is not finite after step"
                f" {run.diverged_step}, and every step is right; use a smaller --learning_rate, or"
                " fewer --steps"
            )
