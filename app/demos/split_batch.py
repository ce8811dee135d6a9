"""`demo split_batch`: shows the rows of each device, and why the example count is global."""

import numpy as np

from app.config import DemoConfig
from app.demos import demo_setup, presentation
from app.devices.device_setup import Devices
from app.runtime import console

_NUM_ROWS, _NUM_COLUMNS = 4, 5


def run(config: DemoConfig) -> None:
    """Splits d2l's batch of 0 to 19 over the devices."""
    prepared = demo_setup.set_up(config)
    presentation.begin(
        f"A batch of {_NUM_ROWS} examples, rows 0 to 19 as in d2l, is split into one shard"
        " for each device: as equal as possible, in order, every row once.",
        prepared,
    )
    asked = config.num_devices or config.num_gpus
    for count in [len(prepared.names)] if asked else sorted({2, len(prepared.names)}):
        shards = split(demo_setup.first(prepared, count))
        _show_shards(shards)
    _print_scaling(shards)
    presentation.end(
        "So no device may divide by the size of its own shard. Each device divides its sum"
        " by the size of the whole batch, and the all-reduce adds: that is exact for uneven"
        " shards too, and for the short batch at the end of an epoch. strategies/loss.py is"
        " the only place that does this.",
        then=[
            "demo split_batch --device=cpu --num_devices=4",
            "verify --inject=mean_of_means --batch_size=257 --steps=5    (finds this very mistake)",
            "demo replicate",
        ],
    )


def split(prepared: Devices) -> list:
    """Returns the shard of each device, a tensor on that device."""
    import tensorflow as tf

    from strategies.manual import split_batch

    batch = tf.reshape(tf.range(_NUM_ROWS * _NUM_COLUMNS), [_NUM_ROWS, _NUM_COLUMNS])
    return [shard for (shard,) in split_batch([batch], prepared.names)]


def _show_shards(shards: list) -> None:
    sizes = ", ".join(str(len(shard)) for shard in shards)
    rows, start = [], 0
    for shard in shards:
        for position, row in enumerate(shard.numpy()):
            name = "" if position else presentation.device_of(shard)
            rows.append([name, start + position, presentation.numbers(row, 0)])
        if not len(shard):
            rows.append([presentation.device_of(shard), "none", ""])
        start += len(shard)
    presentation.show(
        f"{console.count(len(shards), 'device')}: shards of {sizes}",
        ["it is on", "row", "values"],
        rows,
    )


def _print_scaling(shards: list) -> None:
    """Uses the mean of a row as the loss of an example, and averages it in both ways."""
    losses = [shard.numpy().mean(axis=1) for shard in shards]
    everyone = np.concatenate(losses)
    means = [f"{loss.mean():g}" if len(loss) else "nothing" for loss in losses]
    with_examples = [loss.mean() for loss in losses if len(loss)]
    parts = [loss.sum() / len(everyone) for loss in losses]
    sizes = {len(loss) for loss in losses if len(loss)}
    presentation.say(
        f"Take the mean of a row for the loss of that example: {presentation.numbers(everyone, 1)}."
        f" Their mean is {everyone.mean():g}. The mean of the devices' own means"
        f" ({', '.join(means)}) is {np.mean(with_examples):.4g}"
        + (
            ": correct only because these shards have equal sizes."
            if len(sizes) == 1
            else ": wrong, because an example of a small shard has more weight."
        )
        + " Each device's sum divided by the size of the whole batch"
        f" ({' + '.join(f'{part:g}' for part in parts)}) adds up to {sum(parts):g}."
    )
