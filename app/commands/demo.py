"""`demo`: runs the three small experiments of "Dive into Deep Learning" (d2l)."""

import contextlib
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from app import console
from app.errors import DeviceError
from app.options import Config
from app.records.history import TIMING_CAVEAT

if TYPE_CHECKING:  # Not imported before its devices are set up.
    import tensorflow as tf

    from app.devices.setup import Devices
    from strategies.base import Strategy

_TENSOR = "logits/bias"  # Of which the numbers of four classes are shown.


def run(config: Config) -> None:
    """Runs one experiment, or lists all."""
    experiment = config.arguments.experiment
    if not experiment:
        for name, (text, _) in _EXPERIMENTS.items():
            console.say(f"  {name:<13} {text}")
        console.say(f"Start with: {console.shown_command(['demo', 'allreduce'])}")
        return
    text, show = _EXPERIMENTS[experiment]
    training, devices = _set_up(config)
    simulated = f" ({TIMING_CAVEAT})" if devices.simulated else ""
    console.say(f"{text.capitalize()}.")
    console.say(f"{len(devices.names)} devices: {', '.join(devices.names)}{simulated}\n")
    console.say(f"\n{textwrap.fill(show(training, devices), 98)}")


def _set_up(config: Config) -> tuple[Config, "Devices"]:
    """Sets up the requested devices; by default two (three to split a batch), GPUs if enough."""
    from app.devices import setup

    asked, kind = config.distribution.num_gpus, config.distribution.device
    number = asked or (3 if config.arguments.experiment == "split_batch" else 2)
    if kind == "auto" and not asked:
        with contextlib.suppress(DeviceError):
            training = config.for_training("manual", device="gpu", num_gpus=number)
            return training, setup.set_up(training)
        kind = "cpu"
    training = config.for_training("manual", device=kind, num_gpus=number)
    return training, setup.set_up(training)


def show_all_reduce(training: Config, devices: "Devices") -> str:
    """Sums the two small tensors of d2l, with every algorithm."""
    import tensorflow as tf

    from strategies.manual import ALL_REDUCE_FUNCTIONS

    before = []
    for replica_id, device in enumerate(devices.names):
        with tf.device(device):
            before.append([tf.fill([1, 2], replica_id + 1.0)])
    chosen = training.distribution.all_reduce.replace("auto", "reduce_to_one")
    rows = []
    after = ALL_REDUCE_FUNCTIONS[chosen](before, devices.names)
    for (old,), (new,) in zip(before, after, strict=True):
        rows.append([_device_of(new), _shown(old, 0), _shown(new, 0)])
    console.print_table(f"all_reduce, algorithm {chosen}", ["it is on", "before", "after"], rows)
    console.say()
    for name, function in ALL_REDUCE_FUNCTIONS.items():
        sums = sorted({_shown(total, 0) for (total,) in function(before, devices.names)})
        console.say(f"  {name:<14} every device has {' or '.join(sums)}")
    return (
        "A training step does this with the gradients of the shards, so that all devices make the"
        " same update. The all-reduce in examples/wrong_all_reduce.py passes this demonstration and"
        " leaves the gradients wrong."
    )


def show_split_batch(training: Config, devices: "Devices") -> str:
    """Splits d2l's batch of 0 to 19 over the devices, and averages losses in both ways."""
    import tensorflow as tf

    from strategies.manual import split_batch

    batch = tf.reshape(tf.range(20), [4, 5])
    shards = [shard.images for shard in split_batch([batch, batch], devices.names)]
    rows = [[_device_of(shard), _shown(row, 0)] for shard in shards for row in shard.numpy()]
    title = f"{len(shards)} devices: shards of {', '.join(str(len(shard)) for shard in shards)}"
    console.print_table(title, ["it is on", "values"], rows)
    losses = [shard.numpy().mean(axis=1) for shard in shards if len(shard)]
    every = np.concatenate(losses)
    means, parts = [loss.mean() for loss in losses], [loss.sum() / len(every) for loss in losses]
    verdict = "wrong, because an example of a small shard has more weight"
    if len({len(loss) for loss in losses}) == 1:
        verdict = "correct only because these shards have equal sizes"
    return (
        f"Take the mean of a row for the loss of that example: {_shown(every, 1)}."
        f" Their mean is {every.mean():g}. The mean of the devices' own means"
        f" ({', '.join(f'{mean:g}' for mean in means)}) is {np.mean(means):.4g}: {verdict}."
        " Each device's sum divided by the size of the whole batch"
        f" ({' + '.join(f'{part:g}' for part in parts)}) adds up to {sum(parts):g}: exact for"
        " uneven shards too. So do all strategies, as in strategies/manual.py."
    )


def show_replicas(config: Config, devices: "Devices") -> str:
    """Runs the first step of d2l's training and prints what each device holds."""
    from app.data.fashion_mnist import CLASS_NAMES, load_data
    from app.training.build import TrainingRun
    from app.training.checks import check_copies

    training, rows = TrainingRun(config, devices, load_data(config)), []
    for moment, arrays in observe_step(training.strategy, training.batches()).items():
        agree = "yes" if len({array.tobytes() for array in arrays}) == 1 else "no"
        for device, array in zip(devices.names, arrays, strict=True):
            rows.append([moment, device, _shown(array[:4], 6), agree])
    title = f"first step, learning rate {training.learning_rate:g}; {', '.join(CLASS_NAMES[:4])}"
    console.print_table(title, ["moment", "on", _TENSOR, "devices agree?"], rows)
    check_copies(training.strategy)
    number = training.strategy.model.count_params()
    return (
        f"After the step all {number:,} weights on each device are bitwise identical: equal weights"
        " and equal sums of gradients give equal updates."
    )


def observe_step(strategy: "Strategy", batches: "tf.data.Dataset") -> dict[str, list[np.ndarray]]:
    """Trains a built `ManualStrategy` for one step; returns moment → a bias on each replica."""
    from strategies.base import Observer

    paths = [variable.path for variable in strategy.model.trainable_variables]
    index = next(i for i, path in enumerate(paths) if path.endswith(_TENSOR))
    gradients, sums = list[np.ndarray](), list[np.ndarray]()

    class Recorder(Observer):
        def on_shard(self, shard_id, shard, logits, loss, own):  # type: ignore[no-untyped-def]
            gradients.append(own[index].numpy())
            return own

        def on_update(self, copy_id, summed):  # type: ignore[no-untyped-def]
            sums.append(summed[index].numpy())

    def weights() -> list[np.ndarray]:
        return [copy[f"model/{paths[index]}"].numpy() for copy in strategy.copies()]

    moments = {"weight, before": weights()}
    strategy.observer = Recorder()
    strategy.train_step(strategy.distribute(batches))
    moments |= {"gradient of its shard": gradients, "gradient after all-reduce": sums}
    return {**moments, "weight after the update": weights()}


_EXPERIMENTS = {
    "allreduce": ("every device gets the sum of the tensors of all devices", show_all_reduce),
    "split_batch": (
        "which rows of a batch go to which device, and how the loss is scaled", show_split_batch,
    ),
    "replicate": ("weight and gradient on each device, before and after one step", show_replicas),
}  # fmt: skip


def _shown(array: Any, digits: int) -> str:
    form: Any = {"float_kind": lambda x: f"{x:.{digits}f}"} if digits else None
    return np.array2string(np.asarray(array), formatter=form)


def _device_of(tensor: "tf.Tensor") -> str:
    return "/device:" + tensor.device.rpartition("device:")[2]
