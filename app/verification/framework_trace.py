"""Gives a recording of another framework the names and layouts of Keras, and our losses.

Gradients and losses of a replica become its parts of those of the mean loss over the global batch:
if the all-reduce averages over R replicas, 1 / R of what was recorded. With JAX's `jit` and
shardings, replicas have no gradients of their own: the whole batch is then one shard.
"""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from app.runtime.errors import DataError
from lockstep.data import file as trace_file
from lockstep.data.match import Matching
from lockstep.data.trace import STATE, STATISTIC, WEIGHT, About, Shard, Trace, Variable

_LAYOUTS = {4: "HWIO", 2: "IO"}
_COUNTERS = ("iteration", "learning_rate")  # Of Keras' optimizer.


def convert(
    script: Trace, path: pathlib.Path, start: Mapping[str, np.ndarray], *, syncs_batch_norm: bool
) -> None:
    """Writes the converted trace.

    Args:
        script: the recording; its examples are images of bytes, and labels.
        path: file of the converted trace.
        start: Keras' name → initial weight or statistic, in the order of the model.
        syncs_batch_norm: whether BatchNorm normalises over all shards.

    Raises:
        DataError: the recording is of another model.
    """
    variables = [
        Variable(name, STATISTIC if "/moving_" in name else WEIGHT, _LAYOUTS.get(array.ndim, ""))
        for name, array in start.items()
    ]
    model = Trace(About("keras", 1, steps=(0,), variables=tuple(variables)))
    model.put(0, "before", 0, [*start.values()])
    matching = Matching(model, script, {})
    if missing := matching.unmatched_first:
        raise DataError(f"{script.name}: has no variable {missing[0]}; record the same model")
    replicas = range(script.about.num_replicas)
    replicas_of_shards = [[r] for r in replicas] if script.has(0, "raw") else [[*replicas]]
    sizes = [len(_examples(script, 0, replicas)[1]) for replicas in replicas_of_shards]
    shards = [Shard(s, float(size // np.gcd.reduce(sizes))) for s, size in enumerate(sizes)]
    variables += [Variable(f"optimizer/{slot}", STATE, slot=slot) for slot in _COUNTERS]
    about = About(
        script.about.framework,
        len(shards),
        steps=script.steps,
        variables=tuple(variables),
        gradients=tuple(v.name for v in variables if v.kind == WEIGHT),
        shards=tuple(shards),
        num_copies=len(replicas),
        syncs_batch_norm=syncs_batch_norm,
        reduction="sum",
        optimizer=script.about.optimizer,
        data_layout="NHWC",
        structure={"tuple": [0, 1]},
        predicted=0,
        versions=script.about.versions,
    )
    with trace_file.Writer(path) as writer:
        trace = Trace(about, writer)
        for position in range(len(trace.steps)):
            _put_step(trace, position, matching, replicas_of_shards)
        writer.close(about)


def _put_step(
    trace: Trace, position: int, matching: Matching, replicas_of_shards: Sequence[Sequence[int]]
) -> None:
    """Adds a step of the recording, the second trace of `matching`, to the converted trace."""
    _, script = matching.traces
    rate = np.float32(script.about.settings[position][0]["learning_rate"])
    divisor = np.float32(len(replicas_of_shards) if script.about.reduction == "mean" else 1)

    def arrays(kind: str, item: int) -> list[np.ndarray]:
        return [*matching.to_first(script.named(position, kind, item) or {}).values()]

    for copy in trace.copies:
        for when, num_updates in (("before", position), ("after", position + 1)):
            counters = [np.int64(num_updates), rate]
            trace.put(position, when, copy, [*arrays(when, copy), *counters])
        trace.put(position, "sums", copy, arrays("sums", copy))
    for shard, replicas in enumerate(replicas_of_shards):
        (loss,) = script.arrays(position, "loss", shard) or []
        raw = arrays("raw" if script.has(position, "raw") else "sums", shard)
        trace.put(position, "data", shard, _examples(script, position, replicas))
        trace.put(position, "loss", shard, [loss / divisor, np.zeros((), loss.dtype)])
        trace.put(position, "raw", shard, [gradient / divisor for gradient in raw])


def _examples(script: Trace, position: int, replicas: Sequence[int]) -> list[np.ndarray]:
    """Returns images `(n, height, width, channels)` and labels `(n,)` of some replicas."""
    data = [script.arrays(position, "data", replica) or [] for replica in replicas]
    images, labels = (np.concatenate(parts) for parts in zip(*data, strict=True))
    if script.about.data_layout == "NCHW":
        images = images.transpose(0, 2, 3, 1)
    return [images, labels.astype(np.int32)]
