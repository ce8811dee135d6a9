"""Defines the results of a run: an `EpochRecord` per epoch, and a `Summary`."""

import contextlib
import dataclasses
import json
import pathlib
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from app.records.files import read_json, read_text, write_file
from app.runtime.errors import OutputError, reason_of
from app.runtime.versions import CPU_KERNELS, KERNELS_CHANGED, NOT_RECORDED

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")
Parsed = TypeVar("Parsed")

HISTORY_FILE, SUMMARY_FILE = "history.jsonl", "summary.json"
FIGURE_FILES = ("accuracy.png", "accuracy.svg")


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """The results of a finished epoch.

    Attributes:
        epoch: from 1.
        step: optimizer steps since the start of the run.
        train_loss: mean over the examples of the epoch, with the weights before each step.
        train_accuracy: fraction over the same examples.
        test_loss: mean over the whole test set after the epoch.
        test_accuracy: fraction of the test set.
        epoch_sec: seconds of training, without tracing and evaluation.
        images_per_sec: training images over `epoch_sec`.
        statistics_apart: largest difference between the BatchNorm statistics of two replicas,
            before averaging; the trained weights are bitwise identical on all replicas.
        injected_fault: the injected fault; "" without one.
        learning_rate: learning rate of the last step.
        evaluation_sec: seconds of the evaluation on the test set.
        verified_steps: steps of the epoch that were recorded and checked (`--verify_every`).
        mismatches: number of verified steps with a mismatch.
        verification_sec: seconds of recording and checking, not included in `epoch_sec`.
        weights_sha256: hash of the weights after the epoch; see `Summary`.
    """

    epoch: int
    step: int
    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    epoch_sec: float
    images_per_sec: float
    statistics_apart: float = 0.0
    injected_fault: str = ""
    learning_rate: float = 0.0
    evaluation_sec: float = 0.0
    verified_steps: int = 0
    mismatches: int = 0
    verification_sec: float = 0.0
    weights_sha256: str = ""


@dataclasses.dataclass(frozen=True)
class Summary:
    """The configuration and the results of a run, rewritten after every epoch.

    `status` is "running" until the last epoch is done, then "finished". `epoch_sec` and
    `images_per_sec` are medians over the epochs. `weights_sha256` hashes the weights in model
    order: equal hashes mean equal final weights, but not equal steps. Sums are split over the
    threads of an operation, so that another `intra_op_threads` changes the last bits; 0 is
    TensorFlow's default. `changes` lists changed flags of a resumed run.

    `verified_steps` were recorded and checked during the training; `mismatches` of them differed
    from the reference.
    """

    status: str
    command: str
    strategy: str
    num_replicas: int
    num_shards: int
    num_copies: int
    devices: list[str]
    simulated_devices: bool
    intra_op_threads: int
    all_reduce: str
    model: str
    num_parameters: int
    dataset: str
    dataset_sha256: str
    recipe: str
    global_batch_size: int
    learning_rate: float
    precision: str
    jit_compile: bool
    seed: int
    epochs: int
    steps: int
    num_train_examples: int
    num_test_examples: int
    train_loss: float
    test_loss: float
    test_accuracy: float
    best_test_accuracy: float
    epoch_sec: float
    images_per_sec: float
    compile_sec: float
    total_sec: float
    weights_sha256: str
    versions: dict[str, str]
    injected_fault: str = ""
    changes: list[str] = dataclasses.field(default_factory=list)
    verified_steps: int = 0
    mismatches: int = 0

    @property
    def cpu_kernels(self) -> str:
        """The kernels of the CPU that computed the run, with their changes on the way."""
        changes = [change for change in self.changes if KERNELS_CHANGED in change]
        return "; ".join(changes) or self.versions.get(CPU_KERNELS, NOT_RECORDED)

    def verified_line(self) -> str:
        """Returns the number of verified steps as text; "" if there are none."""
        if not self.verified_steps:
            return ""
        found = {0: "no mismatch", 1: "1 mismatch"}
        mismatches = found.get(self.mismatches, f"{self.mismatches:,} mismatches")
        steps = f"{self.verified_steps:,} of {self.steps:,} steps"
        return f"{steps} verified against one device, {mismatches}"

    def last_lines(self) -> list[str]:
        """Returns the last lines of output: verified steps, if any, and `last_line`."""
        return [line for line in (self.verified_line(), self.last_line()) if line]

    def last_line(self) -> str:
        """Returns d2l's last line of a training."""
        accuracy, seconds = self.test_accuracy, self.epoch_sec
        return f"test acc: {accuracy:.2f}, {seconds:.1f} sec/epoch on {self.devices}"


def write_history(run_dir: pathlib.Path, history: list[EpochRecord], summary: Summary) -> None:
    """Writes all epochs so far, one line each, and then the summary; replaces both atomically."""
    for name, text in _texts(history, summary).items():
        write_file(run_dir / name, text)


def is_written(run_dir: pathlib.Path, history: list[EpochRecord], summary: Summary) -> bool:
    """Returns whether the files have this history and summary."""
    with contextlib.suppress(OSError, ValueError):
        texts = _texts(history, summary).items()
        return all(read_text(run_dir / name) == text for name, text in texts)
    return False


def _texts(history: list[EpochRecord], summary: Summary) -> dict[str, str]:
    lines = [json.dumps(dataclasses.asdict(record)) + "\n" for record in history]
    return {
        HISTORY_FILE: "".join(lines),
        SUMMARY_FILE: json.dumps(dataclasses.asdict(summary), indent=2) + "\n",
    }


def load_history(run_dir: pathlib.Path) -> list[EpochRecord]:
    """Reads the epochs of a run for a report; an empty list before the end of the first epoch.

    Raises:
        OutputError: the file exists but is not a history.
    """

    def parse(path: pathlib.Path) -> list[EpochRecord]:
        lines = read_text(path).splitlines()
        return [checked_record(EpochRecord, json.loads(line)) for line in lines]

    return _load(run_dir / HISTORY_FILE, parse) or []


def load_summary(run_dir: pathlib.Path) -> Summary | None:
    """Reads the summary of a run for a report; None before the end of the first epoch.

    Raises:
        OutputError: the file exists but is not a summary.
    """
    return _load(run_dir / SUMMARY_FILE, lambda path: checked_record(Summary, read_json(path)))


def checked_record(record_class: type[Record], values: Mapping[str, Any]) -> Record:
    """Creates a record, a dataclass of plain values, from the values of a file.

    Raises:
        TypeError: a field is missing, unknown or of another type.
    """
    record = record_class(**values)
    for field in dataclasses.fields(record):
        value: Any = getattr(record, field.name)
        if not isinstance(value, _kinds(field.type)):
            raise TypeError(f"{field.name} is {value!r:.80}")
    return record


def _kinds(annotation: Any) -> tuple[type, ...]:
    """Returns the allowed classes of a field."""
    return (int, float) if annotation is float else (typing.get_origin(annotation) or annotation,)


def _load(path: pathlib.Path, parse: Callable[[pathlib.Path], Parsed]) -> Parsed | None:
    if not path.exists():
        return None
    try:
        return parse(path)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise OutputError(
            f"{path}: not readable as {path.name} ({reason_of(error)}); run its training"
            " again, which writes it again from the checkpoint"
        ) from error
