"""Trains all epochs with another framework, and writes a run directory.

The directory has a history, a summary, a figure and a checkpoint like that of a strategy, so that
`report` and `evaluate` can read it.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from app.options import Config
from app.records.checkpoint import Checkpoint, load_finished, save_checkpoint, weights_sha256
from app.records.history import EpochRecord, checked_record
from app.records.run_directory import open_log, open_run_directory
from app.records.run_metadata import Progress, summarize
from app.runtime import console
from app.runtime.errors import DataError, reason_of
from app.runtime.versions import CPU_KERNELS
from app.training.resume import find_checkpoint, find_result
from app.training.run_writer import write_records
from app.verification.frameworks import FRAMEWORKS, Framework, TrainingFiles, run_program


def train_with_framework(
    name: str,
    python: str,
    config: Config,
    files: TrainingFiles,
    own_run: pathlib.Path,
    run_dir: pathlib.Path,
) -> None:
    """Trains with a framework, unless the run is already finished.

    Args:
        name: name of the framework, a key of `FRAMEWORKS`.
        python: interpreter with the framework.
        config: options of the comparison.
        files: files that the framework trains from.
        own_run: finished run of a strategy with the same training.
        run_dir: output directory of the run.

    Raises:
        DataError: the program did not write its results.
        DeviceError: the program failed.
    """
    own, jit_compile = load_finished(own_run), FRAMEWORKS[name].package == "jax"
    fields = {**own.metadata.config, "strategy": name, "jit_compile": jit_compile}
    with open_run_directory(run_dir, fields) as run_directory:
        open_log(run_dir)
        summary = None
        if not config.output.overwrite:
            summary = find_result(run_directory, find_checkpoint(run_dir))
        if summary is None:
            run_directory.start(overwrite=True)  # The program cannot resume.
            results, weights = (files.start.with_name(n) for n in ("results.json", "end.npz"))
            written = {"results": results, "weights": weights}
            run_program(name, python, config, files, written, on_line=console.say)
            try:
                checkpoint = _checkpoint(FRAMEWORKS[name], fields, own, results, weights, config)
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise DataError(
                    f"{name}: did not write its results and weights ({reason_of(error)})"
                ) from error
            save_checkpoint(run_dir, checkpoint)
            write_records(run_dir, checkpoint.metadata, checkpoint.progress)
            summary = summarize(checkpoint.metadata, checkpoint.progress)
        console.say(summary.last_line())


def _checkpoint(
    framework: Framework,
    fields: dict[str, Any],
    own: Checkpoint,
    results: pathlib.Path,
    weights: pathlib.Path,
    config: Config,
) -> Checkpoint:
    """Returns the last checkpoint of a program's training, with the steps of a strategy's."""
    measured: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    state, num_examples = _load_state(weights, own.state), own.metadata.num_train_examples
    history = _history(own.progress.history, measured["epochs"], num_examples)
    history[-1] = dataclasses.replace(history[-1], weights_sha256=weights_sha256(state))
    total_sec = sum(each.epoch_sec + each.evaluation_sec for each in history)
    num_replicas = config.num_framework_replicas
    versions = {n: v for n, v in own.metadata.versions.items() if n != CPU_KERNELS}  # TensorFlow's.
    metadata = dataclasses.replace(
        own.metadata,
        config=fields,
        devices=framework.device_names(num_replicas),
        simulated_devices=num_replicas > 1,
        intra_op_threads=0,
        num_replicas=num_replicas,
        num_shards=1 if framework.syncs_batch_norm else num_replicas,
        num_copies=num_replicas,
        all_reduce=framework.title,
        versions={**versions, **measured["versions"]},
    )
    progress = Progress(own.progress.step, total_sec=total_sec, history=history)
    return Checkpoint(metadata, progress, state)


def _history(
    own: Sequence[EpochRecord], measured: Sequence[Mapping[str, Any]], num_examples: int
) -> list[EpochRecord]:
    """Returns the record of each epoch: what the program has measured, in the steps of `own`."""
    return [
        checked_record(
            EpochRecord,
            {
                **values,
                "epoch": epoch.epoch,
                "step": epoch.step,
                "images_per_sec": num_examples / values["epoch_sec"],
                "learning_rate": epoch.learning_rate,
            },
        )
        for epoch, values in zip(own, measured, strict=True)
    ]


def _load_state(path: pathlib.Path, own: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the state of a strategy with the framework's weights and statistics."""
    with np.load(path, allow_pickle=False) as arrays:
        state = {
            name: arrays[name.removeprefix("model/")] if name.startswith("model/") else array
            for name, array in own.items()
        }
    for name, array in own.items():
        if (state[name].shape, state[name].dtype) != (array.shape, array.dtype):
            raise ValueError(f"{name} has shape {state[name].shape}, not {array.shape}")
    return state
