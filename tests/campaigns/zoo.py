"""Trains every case of the zoo and its correction, and says what the comparison finds.

Each is trained by `fit` under `MirroredStrategy` on logical CPU devices and compared with one
device; the search does not know what is to be found. Fails if a bug is not found at its stage with
its cause, if anything else is found, or if a correction is not clean.
"""

import collections
import contextlib
import dataclasses
import functools
import pathlib
import warnings
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

import lockstep
from app.verification.case_evaluation import compare_evaluation
from lockstep.answer.verdict import Verdict
from lockstep.data.file import from_parts
from lockstep.data.trace import Trace
from lockstep.record_keras import Recorder
from tests.verifier import MARKS, Row
from tests.verifier import check as check_row
from tests.verifier.zoo import CASES, Program

from . import Options, check


def create_cpus(number: int) -> None:
    """Splits the CPU into logical devices, and leaves out warnings of traced functions."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * number
    )
    tf.get_logger().setLevel("ERROR")
    warnings.filterwarnings("ignore", category=UserWarning, module="keras")


def mirrored(num_replicas: int) -> tf.distribute.Strategy:
    """Returns a strategy on logical CPU devices."""
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(num_replicas)],
        # Collectives keep the group of devices of the first strategy of a process.
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    assert strategy.num_replicas_in_sync == num_replicas
    return strategy


def fit(
    strategy: tf.distribute.Strategy,
    build: Callable[[], keras.Model],
    data: tf.data.Dataset,
    distributed: object = None,
    steps: int = 6,
) -> tuple[Verdict, keras.Model, keras.Model, Trace]:
    """Trains under a strategy; returns the verdict, both models and the recording."""
    with strategy.scope():
        model = build()
    with Recorder(model, steps=steps) as record:
        model.fit(data if distributed is None else distributed, verbose=0)
    one_device, trace = build(), from_parts(record.about, record.arrays)
    batches = list(data.as_numpy_iterator())
    return lockstep.compare(trace, model=one_device, batches=batches), model, one_device, trace


def search(program: Program, num_replicas: int) -> Verdict:
    """Trains a program under a strategy, and returns the verdict on it and its evaluation."""
    keras.utils.set_random_seed(1)
    strategy = mirrored(num_replicas)
    given = program.distribute(strategy) if program.distribute else None
    verdict, model, one_device, trace = fit(strategy, program.model, program.data(), given)
    if not program.evaluation_data:
        return verdict
    dataset, distribute = program.evaluation_data(), program.distribute_evaluation
    given = distribute(strategy) if distribute else dataset
    logs = model.evaluate(given, verbose=0, return_dict=True)
    last = len(trace.steps) - 1
    states = [trace.arrays(last, "after", replica) or [] for replica in trace.copies]
    found = compare_evaluation(logs, one_device, states, dataset)
    return dataclasses.replace(verdict, findings=(*verdict.findings, *found))


def rows_of(name: str) -> tuple[Row, Row]:
    """Returns the rows of a case: its wrong program, and its correction."""
    case = CASES[name]
    wrong, right = (
        functools.partial(search, each, case.num_replicas) for each in (case.wrong, case.right)
    )
    also = tuple(f"{stage}: {detail}{MARKS[status]}" for stage, detail, status in case.also)
    found = f"{case.stage}: {case.detail}{MARKS[case.status]}"
    place = case.steps, case.items, case.tensors
    return Row(case.link, name, found, wrong, also=also, place=place), Row(name, "", "", right)


@contextlib.contextmanager
def errors_in(lines: list[str]) -> Iterator[None]:
    """Appends an error as a line, so that the other cases run."""
    try:
        yield
    except Exception as error:
        lines.append(f"{type(error).__name__}: {error}")


def run(folder: pathlib.Path, options: Options, counts: collections.Counter) -> Iterator[str]:
    """Searches the cases; yields a line for each, with what is wrong."""
    create_cpus(3)
    for name in [each for each in CASES if options.wants(each)]:
        case, wrong, twin = CASES[name], list[str](), list[str]()
        for row, lines in zip(rows_of(name), (wrong, twin), strict=True):
            with errors_in(lines):
                check_row(row)
        counts["cases"] += 1
        counts["bugs found at their stage and named"] += not wrong
        counts["clean twins"] += not twin
        told = "\n  ".join([*wrong, *twin]) or "ok"
        yield f"{name} ({case.link}), {case.stage}/{case.detail}: {told}"
    check(len({*counts.values()}) == 1, "not every bug was named, with a clean twin")
