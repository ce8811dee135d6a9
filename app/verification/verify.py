"""Records strategies in turn, in a process of their own, and compares each with one device.

The process sends `("start", text)` for each task, `("step", n)` for each recorded, then for each
repeated step, `("warning", text)`, `("workers", name)` to get the facts of workers that record
themselves, and `("recorded", Recorded)` once both recordings of a strategy are there. They are
compared here while it records the next strategy.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import lockstep
from app import console
from app.children import Channel, Child
from app.devices import setup
from app.devices.local_workers import call_on_workers
from app.options import Config
from app.options.rules import MULTI_WORKER, SINGLE
from app.progress import Progress
from app.records.files import io_errors_as
from app.report.page import DIFFERENT, IDENTICAL
from lockstep.data import file as trace_file
from lockstep.data.trace import OF_COPIES, STATE, STATISTIC, WEIGHT, Trace
from lockstep.engine.verdict import FAULT, Verdict
from lockstep.numeric.arrays import same_bits

if TYPE_CHECKING:  # They import TensorFlow, which `set_up` configures first.
    from app.data.fashion_mnist import ImageDataset
    from app.training.build import TrainingRun

EQUAL, OTHER_TRAINING = "equal within rounding", "two trainings by design"
REFERENCE = "training on one device"
_OF_SHARDS = ("data", "y_pred", "loss", "raw", "own_before", "own_after")


class Recorded(NamedTuple):
    """A strategy that was recorded, and repeated on one device.

    Attributes:
        name: name of the strategy.
        twin: an earlier strategy whose recording has all its bits, and which has the reference of
            both; "" for none.
        devices: names of the devices of all workers.
        facts: how it was trained: simulated_devices, learning_rate, dataset and versions.
    """

    name: str
    twin: str
    devices: Sequence[str]
    facts: Mapping[str, Any]


class Training(NamedTuple):
    """A strategy that was recorded and compared.

    Attributes:
        verdict: the result of the comparison.
        diverged_step: the first step, from 1, after which a loss or a weight is not finite on one
            device, either; 0 for none.
        recorded: what is known of its recording.
    """

    verdict: Verdict
    diverged_step: int
    recorded: Recorded


def verify_strategies(
    config: Config, folder: pathlib.Path
) -> tuple[dict[str, Training], list[dict[str, Any]]]:
    """Records and compares each strategy, one while the next is recorded.

    One that is equal bit for bit to an earlier one has its result.

    Args:
        config: options of the command.
        folder: gets the recordings.

    Returns:
        Strategy → result, and the pairs of strategies.
    """
    num_steps, trainings = config.verification.steps, dict[str, Training]()
    paths = {name: folder / f"{name}.npz" for name in config.strategies}
    with Child(_record_all, config, paths, num_steps) as child, Progress(num_steps) as progress:
        while (received := child.receive())[0] == "message":
            kind, value = received[1]
            if kind == "start":
                progress.start(value)
            elif kind == "workers":
                own, path = config.for_training(value), paths[value]
                # Each writes a file of its replicas; the all-reduce is not used to gather them.
                facts, *_ = call_on_workers(
                    own, _record_as_worker, own, path, num_steps, on_message=progress.message
                )
                child.send(facts)
            elif kind == "recorded":
                if not value.twin:
                    progress.start(f"comparing {value.name} with one device")
                trainings[value.name] = _compared(value, paths, trainings)
            else:
                progress.message((kind, value))
    pairs = itertools.combinations(paths, 2)
    return trainings, [_compare_pair(names, paths, trainings) for names in pairs]


def _compared(
    recorded: Recorded, paths: Mapping[str, pathlib.Path], earlier: Mapping[str, Training]
) -> Training:
    """Returns the result of a strategy: that of its twin, a recording equal bit for bit."""
    if recorded.twin:
        verdict, diverged_step, _ = earlier[recorded.twin]
        verdict = dataclasses.replace(verdict, training=recorded.name)
    else:
        path = paths[recorded.name]
        traces = trace_file.load(_reference_of(path)), trace_file.load(path)
        verdict, diverged_step = judge(*traces, recorded.name)
    return Training(verdict, diverged_step, recorded)


def _reference_of(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.stem}.reference.npz")


# --- Processes -----------------------------------------------------------------------------------


def _record_all(
    channel: Channel, config: Config, paths: Mapping[str, pathlib.Path], num_steps: int
) -> None:
    """Records each strategy, unless workers do, and repeats its steps on one device.

    Args:
        channel: see the module.
        config: options of the command.
        paths: strategy → file of its recording.
        num_steps: number of steps.
    """
    # `single` has the first of their devices; the reference of workers is built as it is.
    several = [name for name in paths if name not in (SINGLE, MULTI_WORKER)]
    devices, dataset = _set_up(channel, config.for_training([*several, SINGLE][0]))
    first = dataclasses.replace(devices, names=devices.names[:1], simulated=False)
    for position, (name, path) in enumerate(paths.items()):
        channel.send(("start", f"recording {name}"))
        if name == MULTI_WORKER:
            run = _build(config.for_training(SINGLE, inject=None), first, dataset)
            channel.send(("workers", name))
            facts = channel.receive()
        else:
            own = first if name == SINGLE else devices
            run = _build(config.for_training(name), own, dataset)
            _record(channel, run, path, num_steps)
            facts = _facts(run)
        names = run.metadata().devices
        if name == MULTI_WORKER:
            names = [
                f"worker {replica}" for replica in range(trace_file.load(path).about.num_replicas)
            ]
        earlier = [*paths][:position]
        twin = next((other for other in earlier if _are_twins(paths[other], path)), "")
        if not twin:
            channel.send(("start", f"repeating {name} on one device"))
            _repeat(channel, run, path)
        channel.send(("recorded", Recorded(name, twin, names, facts)))


def _record_as_worker(
    channel: Channel, config: Config, path: pathlib.Path, num_steps: int
) -> dict[str, Any]:
    devices, dataset = _set_up(channel, config)
    run = _build(config, devices, dataset)
    index = run.strategy.workers.index
    _record(channel, run, path.with_name(f"{path.stem}.rank{index}.npz"), num_steps)
    return _facts(run)


def _set_up(channel: Channel, config: Config) -> "tuple[setup.Devices, ImageDataset]":
    """Sets up TensorFlow, and loads the data."""
    console.forward_warnings(lambda text: channel.send(("warning", text)))
    devices = setup.set_up(config)
    import tensorflow as tf

    from app.data.fashion_mnist import load_data

    tf.config.experimental.enable_tensor_float_32_execution(False)
    return devices, load_data(config)


def _build(config: Config, devices: setup.Devices, dataset: "ImageDataset") -> "TrainingRun":
    """Builds a training, whose steps must be repeatable."""
    from app.training.build import TrainingRun
    from app.verification.recorder import check_repeatable

    run = TrainingRun(config, devices, dataset)
    check_repeatable(run.strategy.model)
    return run


def _facts(run: "TrainingRun") -> dict[str, Any]:
    """Returns how a run trains."""
    metadata = run.metadata()
    names = ("simulated_devices", "learning_rate", "dataset", "dataset_sha256", "versions")
    return {name: getattr(metadata, name) for name in (*names, "num_train_examples")}


def _record(channel: Channel, run: "TrainingRun", path: pathlib.Path, num_steps: int) -> None:
    """Trains and writes the recording of each step, with memory for one step."""
    from app.training.checks import check_all_reduce
    from app.verification.recorder import StepRecorder

    strategy = run.strategy
    check_all_reduce(strategy)
    strategy.observer = recorder = StepRecorder(strategy, run.fault)
    about, iterator = recorder.about(range(num_steps)), strategy.distribute(run.batches())
    with io_errors_as(path), trace_file.Writer(path) as writer:
        trace = Trace(about, writer)
        for step in range(num_steps):
            recorder.record_step(trace, step, lambda: strategy.train_steps(iterator, 1))
            channel.send(("step", step + 1))
        writer.close(about)


def _repeat(channel: Channel, run: "TrainingRun", path: pathlib.Path) -> None:
    """Records the steps of a recording again on one device, each from its recorded state."""
    from app.verification.recorder import Reference, single_of

    recorded, reference = trace_file.load(path), _reference_of(path)
    one = Reference(single_of(run), recorded.about)
    about = one.about(recorded.about)
    with io_errors_as(reference), trace_file.Writer(reference) as writer:
        trace = Trace(about, writer)
        for position in range(len(recorded.steps)):
            one.record_step(trace, recorded, position)
            channel.send(("step", position + 1))
        writer.close(about)


def _are_twins(*paths: pathlib.Path) -> bool:
    """Returns whether two recordings describe the same training and are equal bit for bit."""
    first, second = map(trace_file.load, paths)
    return first.about == second.about and _have_same_arrays(first, second)


def judge(reference: Trace, recorded: Trace, name: str) -> tuple[Verdict, int]:
    """Compares a recording with that of one device.

    Returns:
        The verdict, with the names that the program uses: its steps start from 1. And the first
        step with a value that is not finite on one device, either, or 0.
    """
    verdict = lockstep.compare(reference, recorded)
    names = {step: f"step {step + 1}" for step in verdict.steps}
    verdict = dataclasses.replace(verdict, training=name, reference=REFERENCE, step_names=names)
    return verdict, _diverged_step(reference)


def unlike_copies(trace: Trace) -> str:
    """Says which weight or optimizer state is not bitwise equal on all replicas; "" if all are."""
    for position, kind in itertools.product(range(len(trace.steps)), ("before", "after")):
        first, *others = [trace.named(position, kind, copy) or {} for copy in trace.copies]
        for replica, own in enumerate(others, 1):
            for name in own.keys() & first.keys():
                if trace.kinds[name] in (WEIGHT, STATE) and not same_bits(own[name], first[name]):
                    where = f"{name} on replica {replica} differs from replica 0"
                    return f"{where} {kind} the step, but must be bitwise identical"
    return ""


def _diverged_step(trace: Trace) -> int:
    """Returns the first step, from 1, with a loss or a variable that is not finite; 0 for none."""
    for position, step in enumerate(trace.steps):
        losses = [trace.arrays(position, "loss", shard) or [] for shard in trace.shards]
        arrays = [*itertools.chain(*losses), *(trace.arrays(position, "after", 0) or [])]
        if not all(np.all(np.isfinite(array)) for array in arrays):
            return step + 1
    return 0


# --- Pairs ---------------------------------------------------------------------------------------


def _compare_pair(
    names: tuple[str, str], paths: Mapping[str, pathlib.Path], trainings: Mapping[str, Training]
) -> dict[str, Any]:
    """Compares all arrays that two recordings have in common, bit for bit.

    With other numbers of shards, these are the arrays of the copies.

    Returns:
        The pair as `verify.json` has it: `trainings`, `outcome`, the largest `absolute` difference
        of an element of the weights after the last step, that `relative` to the largest element of
        its array, `where` it is, and `why` they are two trainings by design.
    """
    pair: dict[str, Any] = {"trainings": list(names), "outcome": IDENTICAL}
    pair |= {"absolute": 0.0, "relative": 0.0, "where": "", "why": ""}
    if len({trainings[name].recorded.twin or name for name in names}) == 1:
        return pair
    first, second = (trace_file.load(paths[name]) for name in names)
    if _have_same_arrays(first, second):
        return pair
    last = len(first.steps) - 1
    weights = [trace.named(last, "after", 0) or {} for trace in (first, second)]
    for name in (name for name in weights[0] if first.kinds[name] == WEIGHT):
        a, b = (np.asarray(named[name], np.float64) for named in weights)
        absolute = float(np.max(np.abs(a - b)))
        if not absolute <= pair["absolute"] and np.isfinite(absolute):
            largest = max(np.max(np.abs(a)), np.max(np.abs(b)))
            pair |= {"absolute": absolute, "relative": absolute / float(largest), "where": name}
    parts = [_num_normalised_parts(trace) for trace in (first, second)]
    if any(trainings[name].verdict.status == FAULT for name in names):
        pair["outcome"] = DIFFERENT
    elif parts[0] == parts[1]:
        pair["outcome"] = EQUAL
    else:
        how = ["the whole batch" if num == 1 else f"each of {num} shards" for num in parts]
        pair["outcome"] = OTHER_TRAINING
        pair["why"] = (
            f"{' and '.join(names)} are two trainings by design, not by a fault: BatchNorm"
            f" normalises {how[0]} in {names[0]} and {how[1]} in {names[1]}"
        )
    return pair


def _have_same_arrays(first: Trace, second: Trace) -> bool:
    """Returns whether two recordings are equal bit for bit; their copies, if shards differ."""
    kinds = (*_OF_SHARDS, *OF_COPIES) if len(first.shards) == len(second.shards) else OF_COPIES
    positions = range(len(first.steps))
    return all(_have_same_bits(first, second, p, kind) for p in positions for kind in kinds)


def _have_same_bits(first: Trace, second: Trace, position: int, kind: str) -> bool:
    """Returns whether both have the same arrays of a kind; copies are also those of the first."""
    items = itertools.zip_longest(first.items(kind), second.items(kind), fillvalue=0)
    for pair in items:
        arrays = (
            trace.arrays(position, kind, item) or []
            for trace, item in zip((first, second), pair, strict=True)
        )
        for a, b in itertools.zip_longest(*arrays):
            if (a is None) != (b is None) or (a is not None and a.tobytes() != b.tobytes()):
                return False
    return True


def _num_normalised_parts(trace: Trace) -> int:
    """Returns into how many parts of a batch, each with its own BatchNorm; 1 without BatchNorm."""
    has_statistics = any(variable.kind == STATISTIC for variable in trace.about.variables)
    return len(trace.shards) if has_statistics and not trace.about.syncs_batch_norm else 1
