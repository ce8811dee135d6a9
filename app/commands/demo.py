"""`demo`: runs the three small experiments of "Dive into Deep Learning"."""

import inspect
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from app.devices import device_setup
from app.devices.device_setup import Devices
from app.options import Config
from app.records.caveats import TIMING_CAVEAT
from app.runtime import console
from app.runtime.shown_command import shown_command
from strategies import ALL_REDUCE_ALGORITHMS

if TYPE_CHECKING:  # Not imported before its devices are set up.
    import tensorflow as tf

    from strategies.base import Strategy

_TEXTS = {
    "allreduce": "every device gets the sum of the tensors of all devices",
    "split_batch": "which rows of a batch go to which device, and how the loss is scaled",
    "replicate": "weight and gradient on each device, before and after one step",
}
_WRONG_TEXT = "an all-reduce that passes its demonstration and leaves the gradients wrong"
_NUM_ROWS, _NUM_COLUMNS = 4, 5  # The batch that d2l splits.
_TENSOR, _SHOWN = "logits/bias", 4  # Numbers shown, of ten.


def run(config: Config) -> None:
    """Runs one experiment, or lists all.

    Raises:
        DeviceError: GPUs are required and there are too few.
    """
    if not config.words.experiment:
        for name, text in _TEXTS.items():
            console.say(f"  {name:<13} {text}")
        console.say(f"Start with: {shown_command(['demo', 'allreduce'])}")
        return
    devices = _set_up(config)
    if config.demo.wrong:
        _show_wrong_all_reduce(devices)
    elif config.words.experiment == "allreduce":
        _show_all_reduce(config, devices)
    elif config.words.experiment == "split_batch":
        _show_split_batch(devices)
    else:
        _show_replicas(config, devices)


def _set_up(config: Config) -> Devices:
    """Sets up the requested devices; by default two (three to split a batch), GPUs if enough."""
    num_devices = 3 if config.words.experiment == "split_batch" else 2
    if not (config.distribution.num_devices or config.distribution.num_gpus):
        if config.distribution.device == "auto" and device_setup.count_gpus(config) < num_devices:
            config = config.replace(device="cpu")
        if config.distribution.device == "cpu":
            config = config.replace(num_devices=num_devices)
    devices = device_setup.set_up(config.for_training("manual"))
    text = _WRONG_TEXT if config.demo.wrong else _TEXTS[config.words.experiment or ""]
    _say(text.capitalize() + ".")
    simulated = f" ({TIMING_CAVEAT})" if devices.simulated else ""
    count = console.count(len(devices.names), "device")
    console.say(f"{count}: {', '.join(devices.names)}{simulated}\n")
    return devices


def _show_all_reduce(config: Config, devices: Devices) -> None:
    """Sums the two small tensors of d2l with every algorithm."""
    from strategies.collectives import ALL_REDUCE_FUNCTIONS
    from strategies.manual import all_reduce

    functions = {"reduce_to_one": all_reduce, **ALL_REDUCE_FUNCTIONS}
    algorithm = (
        "reduce_to_one"
        if config.distribution.all_reduce == "auto"
        else config.distribution.all_reduce
    )
    before = tensors_to_add(devices.names)
    after = functions[algorithm](before, devices.names)
    _print_table(
        f"all_reduce, algorithm {algorithm}",
        ["it is on", "before", "after"],
        [
            [_device_of(new), _numbers(old, 0), _numbers(new, 0)]
            for (old,), (new,) in zip(before, after, strict=True)
        ],
    )
    for name in ALL_REDUCE_ALGORITHMS["manual"]:
        sums = {_numbers(total, 0) for (total,) in functions[name](before, devices.names)}
        console.say(f"  {name:<14} every device has {' or '.join(sorted(sums))}")
    console.say()
    _say(
        "A training step does this with the gradients: each device contributes the gradient of"
        " its shard and receives the sum. So all devices make the same update."
    )
    _try(
        "demo allreduce --device=cpu --num_devices=8 --all_reduce=ring",
        "demo allreduce --wrong    (passes the same demonstration, and trains wrongly)",
        "demo replicate",
    )


def _show_wrong_all_reduce(devices: Devices) -> None:
    """Shows what a wrong all-reduce leaves in its list, in the gradients and in the weights."""
    from app.commands.wrong_all_reduce import (
        LEARNING_RATE,
        right_all_reduce,
        train_step,
        wrong_all_reduce,
    )

    tensors = [tensor for (tensor,) in tensors_to_add(devices.names)]
    wrong, right = (train_step(f, tensors) for f in (wrong_all_reduce, right_all_reduce))
    before = [_numbers(tensor, 0) for tensor in tensors]
    console.say(textwrap.indent(inspect.getsource(wrong_all_reduce), "  "))
    on = [_device_of(tensor) for tensor in tensors]
    listed = [_numbers(item, 0) for item in wrong.data]
    _print_table(
        "its demonstration: the list",
        ["it is on", "before", "after"],
        [list(row) for row in zip(on, before, listed, strict=True)],
    )
    columns = [
        [_numbers(gradient, 0) for gradient in wrong.gradients],
        [_numbers(weight, 1) for weight in wrong.weights],
        [_numbers(weight, 1) for weight in right.weights],
    ]
    _print_table(
        f"a training step: the gradients, and weights of 1 after it, learning rate {LEARNING_RATE}",
        ["on", "before", "after all-reduce", "weight", "correct weight"],
        [list(row) for row in zip(on, before, *columns, strict=True)],
    )
    _say(
        "The list has the sum for every device. But data[i] = … changes only the list: the"
        " gradients of the training are the sum on the first device, and unchanged on the others."
        " So the devices make different updates, and their weights differ. Write into the"
        " gradients instead: data[i].assign(data[0]), in PyTorch data[i][:] = …."
        " docs/wrong_all_reduce.md shows a whole training with it, and what finds it."
    )
    _try("demo allreduce", "demo replicate")


def tensors_to_add(names: Sequence[str]) -> list[list["tf.Tensor"]]:
    """Returns for each device r a list with one tensor `(1, 2)`, filled with r + 1."""
    import tensorflow as tf

    per_replica_tensors = []
    for replica_id, name in enumerate(names):
        with tf.device(name):
            per_replica_tensors.append([tf.fill([1, 2], tf.cast(replica_id + 1, tf.float32))])
    return per_replica_tensors


def _show_split_batch(devices: Devices) -> None:
    """Splits d2l's batch of 0 to 19 over the devices, and averages losses in both ways."""
    shards = split(devices.names)
    rows = []
    for shard in shards:
        for row in shard.numpy():
            rows.append([_device_of(shard), _numbers(row, 0)])
    sizes = ", ".join(str(len(shard)) for shard in shards)
    count = console.count(len(shards), "device")
    _print_table(f"{count}: shards of {sizes}", ["it is on", "values"], rows)
    losses = [shard.numpy().mean(axis=1) for shard in shards]
    everyone = np.concatenate(losses)
    means = [loss.mean() for loss in losses if len(loss)]
    parts = [loss.sum() / len(everyone) for loss in losses]
    if len({len(loss) for loss in losses if len(loss)}) == 1:
        verdict = "correct only because these shards have equal sizes"
    else:
        verdict = "wrong, because an example of a small shard has more weight"
    _say(
        f"Take the mean of a row for the loss of that example: {_numbers(everyone, 1)}."
        f" Their mean is {everyone.mean():g}. The mean of the devices' own means"
        f" ({', '.join(f'{mean:g}' for mean in means)}) is {np.mean(means):.4g}: {verdict}."
        " Each device's sum divided by the size of the whole batch"
        f" ({' + '.join(f'{part:g}' for part in parts)}) adds up to {sum(parts):g}:"
        " exact for uneven shards too. So do all strategies, as in strategies/manual.py."
    )
    _try(
        "demo split_batch --device=cpu --num_devices=4",
        "verify --inject=mean_of_means --batch_size=257 --steps=5    (finds this very mistake)",
        "demo replicate",
    )


def split(names: Sequence[str]) -> list["tf.Tensor"]:
    """Returns the shard of each device, a tensor on that device."""
    import tensorflow as tf

    from strategies.collectives import shard_bounds
    from strategies.manual import split_batch

    batch = tf.reshape(tf.range(_NUM_ROWS * _NUM_COLUMNS), [_NUM_ROWS, _NUM_COLUMNS])
    bounds = [shard_bounds(_NUM_ROWS, len(names), r) for r in range(len(names))]
    return [shard for (shard,) in split_batch([batch], names, bounds)]


def _show_replicas(config: Config, devices: Devices) -> None:
    """Runs the first step of d2l's training and prints what each device holds."""
    from app.data.dataset import CLASS_NAMES
    from app.data.dataset_loader import load_data
    from app.training.training_spec import TrainingSpec

    training = config.for_training("manual", num_devices=None, num_gpus=None)
    spec = TrainingSpec(training, load_data(training))
    strategy = spec.build_strategy(devices)
    rows = []
    for moment, per_replica in observe_step(strategy, spec.batches()).items():
        agree = "yes" if len({array.tobytes() for array in per_replica}) == 1 else "no"
        for name, array in zip(devices.names, per_replica, strict=True):
            rows.append([moment, name, _numbers(array[:_SHOWN], 6), agree])
    _print_table(
        f"the first step, batch {training.training.global_batch_size}, learning rate"
        f" {spec.learning_rate:g}; {', '.join(CLASS_NAMES[:_SHOWN])}",
        ["moment", "on", _TENSOR, "devices agree?"],
        rows,
    )
    first, *others = strategy.states.per_copy()
    same = all(first[name].tobytes() == other[name].tobytes() for other in others for name in first)
    _say(
        f"After the step all {strategy.model.count_params():,} weights on each device"
        f" {'are bitwise identical' if same else 'differ'}. Weights are copied once, before the"
        " first step: equal weights and equal sums give equal updates."
    )
    _try(
        "verify --strategies=manual,mirrored --steps=5    (checks every step like this)",
        "demo replicate --device=cpu --num_devices=4 --all_reduce=ring",
    )


def observe_step(strategy: "Strategy", batches: "tf.data.Dataset") -> dict[str, list[np.ndarray]]:
    """Trains one step, recorded as `verify` does, and returns a small tensor at each moment.

    Args:
        strategy: a built strategy with one shard and one copy on each replica.
        batches: images and labels of global batches.

    Returns:
        Moment → the tensor on each replica.
    """
    from app.verification.recorder import StepRecorder
    from lockstep.data.trace import Trace

    strategy.observer = recorder = StepRecorder(strategy)
    trace, iterator = Trace(recorder.about((0,))), strategy.distribute(batches)
    recorder.record_step(trace, 0, lambda: strategy.train_steps(iterator, 1))
    moments = {
        "weight, before": "before",
        "gradient of its shard": "raw",
        "gradient after all-reduce": "sums",
        "weight after the update": "after",
    }
    (name,) = [name for name in trace.about.gradients if name.endswith(_TENSOR)]
    return {
        moment: [(trace.named(0, kind, r) or {})[name] for r in range(strategy.num_replicas)]
        for moment, kind in moments.items()
    }


def _say(text: str) -> None:
    console.say(textwrap.fill(text, 98))


def _print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    console.print_table(title, header, rows)
    console.say()


def _try(*words: str) -> None:
    for number, line in enumerate(words):
        console.say(f"{'Try:' if number == 0 else '    '} {shown_command([])} {line}")


def _numbers(array: Any, digits: int) -> str:
    form: Any = {"float_kind": lambda x: f"{x:.{digits}f}"} if digits else None
    return np.array2string(np.asarray(array), formatter=form, max_line_width=10_000)


def _device_of(tensor: "tf.Tensor") -> str:
    return "/device:" + tensor.device.rpartition("device:")[2]
