"""Defines the results of a training, and writes them: history, summary and TensorBoard's events.

All records are computed from the metadata and one record for each epoch, which checkpoints have.
"""

import contextlib
import dataclasses
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from app.records import files

HISTORY_FILE, SUMMARY_FILE = "history.jsonl", "summary.json"
FIGURE_FILES = ("accuracy.png", "accuracy.svg")
DATASET_CAVEATS = {
    "synthetic": "GENERATED images in place of Fashion-MNIST: accuracies are not comparable",
}
TIMING_CAVEAT = "simulated devices: timing is not scaling"
_DERIVED = ("train_loss", "train_accuracy", "images_per_sec")  # Of a record, stored for readers.
_CHANCE = 0.15  # Ten classes: the accuracy of guessing is 0.1.


@dataclasses.dataclass(frozen=True)
class RunMetadata:
    """Describes what is trained on which data."""

    config: dict  # The options that the result depends on, as in `config.json`.
    learning_rate: float  # The peak; from the recipe if no flag sets it.
    steps_per_epoch: int
    dataset: str
    dataset_sha256: str  # Of all images and labels, in order.
    test_part_sha256: str  # Of the test images and labels.
    num_train_examples: int
    num_test_examples: int
    devices: list  # Names of the devices of all workers.
    simulated_devices: bool  # Whether several devices share a processor.
    num_replicas: int
    num_shards: int  # Of each global batch.
    all_reduce: str
    num_parameters: int
    versions: dict


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """The results of an epoch; the last one of a training may be unfinished."""

    epoch: int  # From 1.
    step: int  # Optimizer steps since the start of the run.
    epoch_step: int  # Optimizer steps of this epoch.
    loss_sum: float  # Of the examples of the epoch, with the weights before each step.
    correct: int
    examples: int
    epoch_sec: float  # Of steps that are not verified, without tracing and evaluation.
    test_loss: float | None = None  # None before the evaluation.
    test_accuracy: float | None = None
    evaluation_sec: float = 0.0
    learning_rate: float = 0.0  # Of the last step.
    verified_steps: int = 0  # Steps that were recorded and checked (`--verify_every`).
    weights_sha256: str = ""  # After the epoch.

    @property
    def is_finished(self) -> bool:
        """Whether all steps are trained and the test set is evaluated."""
        return self.test_accuracy is not None

    @property
    def train_loss(self) -> float:
        """Mean loss over the examples."""
        return self.loss_sum / self.examples if self.examples else 0.0

    @property
    def train_accuracy(self) -> float:
        """Fraction of right predictions."""
        return self.correct / self.examples if self.examples else 0.0

    @property
    def images_per_sec(self) -> float:
        """Training images of the steps that `epoch_sec` covers, over it."""
        if not self.epoch_sec:
            return 0.0
        return self.examples * (1 - self.verified_steps / self.epoch_step) / self.epoch_sec


def finished(epochs: Sequence[EpochRecord]) -> list[EpochRecord]:
    """Returns the finished epochs: all, or all but the last one."""
    return [record for record in epochs if record.is_finished]


def is_complete(metadata: RunMetadata, epochs: Sequence[EpochRecord]) -> bool:
    """Returns whether all epochs of a training are finished."""
    return len(finished(epochs)) == metadata.config["epochs"]


Record = TypeVar("Record", RunMetadata, EpochRecord)
Run = tuple[dict[str, Any], Sequence[EpochRecord]]  # A summary, and at least one epoch.
Draw = Callable[[Mapping[str, Run], pathlib.Path], None]  # Draws runs by name into a directory.


def checked(record: Record) -> Record:
    """Returns a record that was read from a file; raises TypeError if a value has another type."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if not isinstance(value, field.type):  # type: ignore[arg-type]
            raise TypeError(f"{field.name} is {value!r:.80}")
    return record


def summarize(metadata: RunMetadata, epochs: Sequence[EpochRecord]) -> dict[str, Any]:
    """Returns the content of `summary.json`: options, metadata, and results of finished epochs.

    `epoch_sec` and `images_per_sec` are medians. Equal `weights_sha256` mean equal weights.
    """
    history, about = finished(epochs), dataclasses.asdict(metadata)
    config, last = about.pop("config"), history[-1]
    return {
        "status": "finished" if is_complete(metadata, epochs) else "running",
        **config,
        **about,
        "injected_fault": config.get("inject") or "",
        "steps": last.step,
        "train_loss": last.train_loss,
        "test_loss": last.test_loss,
        "test_accuracy": last.test_accuracy,
        "best_test_accuracy": max(record.test_accuracy or 0.0 for record in history),
        "epoch_sec": statistics.median(record.epoch_sec for record in history),
        "images_per_sec": statistics.median(record.images_per_sec for record in history),
        "verified_steps": sum(record.verified_steps for record in history),
        "weights_sha256": last.weights_sha256,
    }


def last_lines(summary: Mapping[str, Any]) -> list[str]:
    """Returns the last lines of output: the verified steps, if any, and d2l's last line."""
    accuracy, seconds = summary["test_accuracy"], summary["epoch_sec"]
    lines = [f"test acc: {accuracy:.2f}, {seconds:.1f} sec/epoch on {summary['devices']}"]
    if count := summary["verified_steps"]:
        lines.insert(0, f"{count:,} of {summary['steps']:,} steps verified against one device")
    return lines


def caveats(summary: Mapping[str, Any]) -> list[str]:
    """Returns a line for each reason why the accuracy of a training is no good result."""
    lines = []
    if summary["injected_fault"]:
        lines.append(injected_fault_caveat(summary["injected_fault"]))
    if summary["dataset"] in DATASET_CAVEATS:
        lines.append(DATASET_CAVEATS[summary["dataset"]])
    if summary["test_accuracy"] < _CHANCE:
        lines.append(
            f"test accuracy {summary['test_accuracy']:.4f} is hardly better than guessing: nothing"
            " has been learned yet; use more --epochs, or another --learning_rate or --recipe"
        )
    return lines


def injected_fault_caveat(fault: object) -> str:
    """Returns the caveat shown with every result of a training with an injected fault."""
    return f"injected fault: {fault}; the result is wrong on purpose"


def versions() -> dict[str, str]:
    """Returns the versions of the software that affects the results; imports TensorFlow."""
    import keras
    import numpy
    import tensorflow

    found = {module.__name__: module.__version__ for module in (tensorflow, keras, numpy)}
    return {"python": platform.python_version(), **found}


def write_history(
    run_dir: pathlib.Path, metadata: RunMetadata, epochs: Sequence[EpochRecord], draw: Draw
) -> None:
    """Writes figure, history and summary, unless they are there; removes those of no epoch."""
    history = finished(epochs)
    if not history:  # Records of an earlier attempt describe epochs that this training has lost.
        for name in (SUMMARY_FILE, HISTORY_FILE, *FIGURE_FILES):
            files.remove(run_dir / name)
        return
    summary = summarize(metadata, epochs)
    lines = [vars(each) | {name: getattr(each, name) for name in _DERIVED} for each in history]
    contents = {
        HISTORY_FILE: "".join(json.dumps(line) + "\n" for line in lines).encode(),
        SUMMARY_FILE: json.dumps(summary, indent=2).encode(),
    }
    with contextlib.suppress(OSError, ValueError):
        has_figure = all((run_dir / name).exists() for name in FIGURE_FILES)
        if has_figure and all(files.read_bytes(run_dir / n) == c for n, c in contents.items()):
            return
    draw({summary["strategy"]: (summary, history)}, run_dir)
    for name, content in contents.items():  # The summary is written last.
        files.write_file(run_dir / name, content)


def load_history(run_dir: pathlib.Path) -> list[EpochRecord]:
    """Reads the finished epochs of a run; raises OutputError if the file is damaged."""
    path, epochs = run_dir / HISTORY_FILE, list[EpochRecord]()
    with files.damage_as_error(path):
        for line in files.read_bytes(path).splitlines() if path.exists() else ():
            values = {name: v for name, v in json.loads(line).items() if name not in _DERIVED}
            epochs.append(checked(EpochRecord(**values)))
        if [record.epoch for record in finished(epochs)] != list(range(1, len(epochs) + 1)):
            raise ValueError("epochs that do not follow one another")
    return epochs


def load_summary(run_dir: pathlib.Path) -> dict[str, Any] | None:
    """Reads the summary of a run; None before its first epoch ends; raises as `load_history`."""
    path = run_dir / SUMMARY_FILE
    with files.damage_as_error(path):
        summary = files.read_json(path) if path.exists() else None
        if summary is not None:
            summary["weights_sha256"], summary["test_accuracy"] + 0.0
        return summary


def event_files(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """Returns TensorBoard's event files of a run, one for each attempt, in order."""
    return sorted(run_dir.glob("events.out.tfevents.*.lockstep"))


class EventWriter:
    """Writes scalars over steps for `tensorboard --logdir=runs`, in a file for each attempt.

    Each file starts with a restart after `step`, at which TensorBoard drops later events of earlier
    attempts. A full disk, which the failed write of a record reports, is ignored.
    """

    def __init__(self, run_dir: pathlib.Path, step: int) -> None:
        import tensorflow as tf

        path = run_dir / f"events.out.tfevents.{len(event_files(run_dir)):012d}.lockstep"
        self._tf, self._writer = tf, tf.io.TFRecordWriter(str(path))
        self._write({"file_version": "brain.Event:2"})
        self._write({"step": step + 1, "session_log": {"status": "START"}})

    def add(self, step: int, group: str, scalars: Mapping[str, float]) -> None:
        """Adds scalars at a step, under the tags `group/name`."""
        values = [{"tag": f"{group}/{tag}", "simple_value": v} for tag, v in scalars.items()]
        self._write({"step": step, "summary": {"value": values}})

    def add_epoch(self, record: EpochRecord) -> None:
        """Adds the results of a finished epoch."""
        names = (*_DERIVED, "test_loss", "test_accuracy", "epoch_sec", "evaluation_sec")
        self.add(record.step, "epochs", {name: getattr(record, name) for name in names})

    def _write(self, fields: dict[str, Any]) -> None:
        """Writes an event, so that it is visible to TensorBoard at once."""
        event = self._tf.compat.v1.Event(wall_time=time.time(), **fields)
        with contextlib.suppress(self._tf.errors.OpError):
            self._writer.write(event.SerializeToString())
            self._writer.flush()
