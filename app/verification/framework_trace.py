"""Gives a recording of another framework the names and layouts of Keras, and our losses.

Gradients and losses of a replica become its parts of those of the mean loss over the global batch:
if the all-reduce averages over R replicas, 1 / R of what was recorded. With JAX's `jit` and
shardings, replicas have no gradients of their own: the whole batch is then one shard.
"""

import pathlib
from collections.abc import Mapping

import numpy as np

from app.runtime.errors import DataError
from lockstep.data import file as trace_file
from lockstep.data.match import Matching
from lockstep.data.trace import STATE, STATISTIC, WEIGHT, About, Shard, Trace, Variable

_LAYOUTS = {4: "HWIO", 2: "IO"}
_COUNTERS = ("iteration", "learning_rate")  # Of Keras' optimizer.


def convert(
    script: Trace, path: pathlib.Path, start: Mapping[str, np.ndarray], *, syncs_batch_norm: bool
) -> About:
    """Writes the converted trace to `path`, and returns its description.

    Args:
        script: the recording; its examples are images of bytes, and labels.
        path: file of the converted trace.
        start: Keras' name → initial weight or statistic, in the order of the model.
        syncs_batch_norm: whether BatchNorm normalises over all shards.

    Raises:
        DataError: the recording is of another model.
    """
    matching = Matching(_start_of_keras(start), script, {})
    if missing := matching.unmatched_first:
        raise DataError(f"{script.name}: has no variable {missing[0]}; record the same model")
    about = script.about
    replicas_of_shards = [range(about.num_replicas)]
    if script.has(0, "raw"):
        replicas_of_shards = [range(r, r + 1) for r in range(about.num_replicas)]
    num_shards = len(replicas_of_shards)
    divisor = np.float32(num_shards if about.reduction == "mean" else 1)
    sizes = [len(_examples(script, 0, replicas)[1]) for replicas in replicas_of_shards]
    variables = [
        *_variables(start),
        *(Variable(f"optimizer/{slot}", STATE, slot=slot) for slot in _COUNTERS),
    ]
    converted = About(
        about.framework,
        num_shards,
        steps=about.steps,
        variables=tuple(variables),
        gradients=tuple(v.name for v in variables if v.kind == WEIGHT),
        shards=tuple(Shard(s, float(sizes[s] // np.gcd.reduce(sizes))) for s in range(num_shards)),
        num_copies=about.num_replicas,
        syncs_batch_norm=syncs_batch_norm,
        reduction="sum",
        optimizer=about.optimizer,
        data_layout="NHWC",
        structure={"tuple": [0, 1]},
        predicted=0,
        versions=about.versions,
    )

    def arrays(position: int, kind: str, item: int) -> list[np.ndarray]:
        return [*matching.to_first(script.named(position, kind, item) or {}).values()]

    with trace_file.Writer(path) as writer:
        trace = Trace(converted, writer)
        for position, (settings, *_) in enumerate(about.settings):
            rate = np.float32(settings["learning_rate"])
            for copy in trace.copies:
                for when, num_updates in (("before", position), ("after", position + 1)):
                    counters = [np.int64(num_updates), rate]
                    trace.put(position, when, copy, [*arrays(position, when, copy), *counters])
                trace.put(position, "sums", copy, arrays(position, "sums", copy))
            for shard, replicas in enumerate(replicas_of_shards):
                (loss,) = script.arrays(position, "loss", shard) or []
                raw = arrays(position, "raw" if script.has(position, "raw") else "sums", shard)
                trace.put(position, "data", shard, _examples(script, position, replicas))
                trace.put(position, "loss", shard, [loss / divisor, np.zeros((), loss.dtype)])
                trace.put(position, "raw", shard, [gradient / divisor for gradient in raw])
        writer.close(converted)
    return converted


def _start_of_keras(start: Mapping[str, np.ndarray]) -> Trace:
    """Returns a trace with the names, layouts and values before the first step."""
    trace = Trace(About("keras", 1, steps=(0,), variables=tuple(_variables(start))))
    trace.put(0, "before", 0, [*start.values()])
    return trace


def _variables(start: Mapping[str, np.ndarray]) -> list[Variable]:
    return [
        Variable(name, STATISTIC if "/moving_" in name else WEIGHT, _LAYOUTS.get(array.ndim, ""))
        for name, array in start.items()
    ]


def _examples(script: Trace, position: int, replicas: range) -> list[np.ndarray]:
    """Returns images `(n, height, width, channels)` and labels `(n,)` of some replicas."""
    data = [script.arrays(position, "data", replica) or [] for replica in replicas]
    images, labels = (np.concatenate(parts) for parts in zip(*data, strict=True))
    if script.about.data_layout == "NCHW":
        images = images.transpose(0, 2, 3, 1)
    return [images, labels.astype(np.int32)]
