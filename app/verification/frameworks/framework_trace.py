"""Converts the recording of another framework to the trace of a strategy.

Names and layouts become those of Keras. A gradient becomes the replica's part of the gradient of
the mean loss over the global batch: if the all-reduce averages over R replicas, 1 / R of the
recorded gradient. With JAX's `jit` and shardings, replicas have no gradients of their own; the
whole batch is then one shard, whose gradient is the sum.
"""

import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from app.records.script_trace import Rows, ScriptTrace
from app.records.trace_about import Variable
from app.runtime.errors import DataError
from app.verification.frameworks.image_labels import ImageLabels
from app.verification.trace import TraceWriter, hash_examples

Arrays = dict[str, np.ndarray]
Batch = tuple[np.ndarray, np.ndarray]  # Images and labels.

# Axes of another framework's layout, in the order of Keras.
_AXES = {"OIHW": (2, 3, 1, 0), "OI": (1, 0)}
_KERAS_NAMES = {"running_mean": "moving_mean", "running_var": "moving_variance"}


def convert_trace(
    script: ScriptTrace,
    names: Sequence[str],
    batches: Iterable[Batch],
    labels: ImageLabels,
    path: pathlib.Path,
) -> list[int]:
    """Writes the trace of a recording with consecutive steps from 0.

    Args:
        script: the recording.
        names: Keras names of weights and statistics, in the order of the model.
        batches: images and labels of each step.
        labels: labels of the training set. A recording of PyTorch has the arguments of the model,
            images without labels; a wrong label shows in the loss.
        path: directory of the trace.

    Returns:
        The number of examples of each shard in the first step.

    Raises:
        DataError: the recording is incomplete, or weights change between two steps.
    """
    if list(script.steps) != list(range(len(script.steps))):
        raise DataError(f"{script.name}: steps {script.steps} do not follow each other from 0 on")
    reader = _Reader(script, names, labels)
    num_replicas = script.num_replicas if reader.has_shards else 1
    with TraceWriter(path, num_replicas) as trace:
        after = reader.states(0, "before")
        _write_state(trace, 0, after, reader.settings(0, num_updates=0))
        sizes: list[int] = []
        for position, batch in zip(range(len(script.steps)), batches, strict=False):
            before = reader.states(position, "before")
            _check_same(script, position, before, after)
            step = position + 1
            shards = reader.examples(position, batch)
            sizes = sizes or [len(labels) for _, labels in shards]
            hashes = [hash_examples(images, labels) for images, labels in shards]
            trace.write(step, "examples", [{"examples": shard} for shard in hashes])
            trace.write(step, "loss", reader.losses(position))
            trace.write(step, "gradients", reader.gradients(position))
            trace.write(step, "sums", reader.sums(position))
            after = reader.states(position, "after")
            _write_state(trace, step, after, reader.settings(position, num_updates=step))
    return sizes


def _write_state(
    trace: TraceWriter, step: int, states: Mapping[str, list[Arrays]], slots: Arrays
) -> None:
    trace.write(step, "weights", states["weights"])
    own = states["own statistics"]
    trace.write(step, "own statistics", own)
    mean = {name: np.mean([arrays[name] for arrays in own], axis=0) for name in own[0]}
    trace.write(step, "statistics", [mean])
    trace.write(step, "slots", [slots])


def _check_same(
    script: ScriptTrace,
    position: int,
    before: Mapping[str, list[Arrays]],
    after: Mapping[str, list[Arrays]],
) -> None:
    """Checks that a step starts from the state after the previous step."""
    for kind, replicas in before.items():
        for replica_id, arrays in enumerate(replicas):
            for name, array in arrays.items():
                if array.tobytes() != after[kind][replica_id][name].tobytes():
                    raise DataError(
                        f"{script.name}: {name} of replica {replica_id} changes before step"
                        f" {position}, outside of a step; change it in the optimizer only"
                    )


class _Reader:
    """Reads arrays of a recording by Keras name.

    Args:
        script: the recording.
        names: Keras names of weights and statistics, in the order of the model.
        labels: labels of the training set.

    Attributes:
        has_shards: whether the recording has the gradients of each replica.
    """

    def __init__(self, script: ScriptTrace, names: Sequence[str], labels: ImageLabels):
        self._script, self._names, self._labels = script, names, labels
        self._variables = {_keras_name(v, script.variables): v for v in script.variables}
        missing = [name for name in names if name not in self._variables]
        if missing:
            raise DataError(f"{script.name}: has no variable {missing[0]}; record the same model")
        self.has_shards = script.shapes(0, "raw", 0) is not None

    def states(self, position: int, kind: str) -> dict[str, list[Arrays]]:
        """Returns weights of each copy and statistics of each shard, "before" or "after" a step."""
        replicas = [
            dict(zip(self._script.variables, self._arrays(position, kind, r), strict=True))
            for r in range(self._script.num_replicas)
        ]
        found: dict[str, list[Arrays]] = {}
        for of, own in ("weight", "weights"), ("statistic", "own statistics"):
            of_kind = {n: v for n, v in self._named() if v.kind == of}
            found[own] = [{n: _as_keras(a[v], v) for n, v in of_kind.items()} for a in replicas]
        if not self.has_shards:
            del found["own statistics"][1:]
        return found

    def _named(self) -> Iterator[tuple[str, Variable]]:
        return ((name, self._variables[name]) for name in self._names)

    def examples(self, position: int, batch: Batch) -> list[Batch]:
        """Returns uint8 images `(n, height, width, channels)` and labels `(n,)` of each shard.

        Args:
            position: position of the step.
            batch: images and labels of the global batch.
        """
        data = [self._arrays(position, "data", r) for r in range(self._script.num_replicas)]
        images = [_as_bytes(arrays[0], self._script) for arrays in data]
        if len(data[0]) > 1:
            labels = [arrays[1].ravel() for arrays in data]
        else:
            labels = self._labels.of_batch(images, batch)
        if self.has_shards:
            return list(zip(images, labels, strict=True))
        return [(np.concatenate(images), np.concatenate(labels))]

    def losses(self, position: int) -> list[Arrays]:
        """Returns each shard's part of the mean loss of the global batch."""
        losses = [self._arrays(position, "loss", r)[0] for r in range(self._num_shards)]
        return [{"loss": self._part(loss)} for loss in losses]

    def gradients(self, position: int) -> list[Arrays]:
        """Returns the gradients of these parts, for each shard."""
        if not self.has_shards:
            return self.sums(position)[:1]
        return [
            {name: self._part(gradient) for name, gradient in self._of_weights(position, "raw", r)}
            for r in range(self._num_shards)
        ]

    def sums(self, position: int) -> list[Arrays]:
        """Returns the gradients after the all-reduce, for each replica.

        Without an all-reduce, returns the gradients that each replica's optimizer applies.
        """
        replicas = range(self._script.num_replicas)
        is_reduced = self._script.shapes(position, "sums", 0) is not None
        kind = "sums" if is_reduced else "clipped"
        return [dict(self._of_weights(position, kind, r)) for r in replicas]

    def settings(self, position: int, *, num_updates: int) -> Arrays:
        """Returns the optimizer's state: number of updates and learning rate."""
        groups = self._script.settings(position, 0)
        rates = {group["learning_rate"] for group in groups}
        if len(rates) != 1:
            raise DataError(f"{self._script.name}: has {len(rates)} learning rates; use one")
        return {
            "iteration": np.array(num_updates, np.int64),
            "learning_rate": np.array(rates.pop(), np.float32),
        }

    @property
    def _num_shards(self) -> int:
        return self._script.num_replicas if self.has_shards else 1

    def _part(self, array: np.ndarray) -> np.ndarray:
        averages = self.has_shards and self._script.reduction == "mean"
        return array / np.float32(self._script.num_replicas) if averages else array

    def _of_weights(
        self, position: int, kind: str, replica: int
    ) -> Iterator[tuple[str, np.ndarray]]:
        arrays = self._arrays(position, kind, replica)
        found = dict(zip(self._script.gradients, arrays, strict=True))
        for name, variable in self._named():
            if variable.kind == "weight":
                yield name, _as_keras(found[variable.name], variable)

    def _arrays(self, position: int, kind: str, replica: int) -> list[np.ndarray]:
        arrays = self._script.arrays(position, kind, replica)
        if arrays is None:
            raise DataError(
                f"{self._script.name}: has no {kind!r} of replica {replica} in step {position};"
                " record it again"
            )
        return [np.asarray(a.dense() if isinstance(a, Rows) else a) for a in arrays]


def _keras_name(variable: Variable, variables: Sequence[Variable]) -> str:
    """Returns the Keras name of a variable: `conv1/kernel` for PyTorch's `conv1.weight`.

    JAX programs use Keras names; a recording prefixes statistics with `state/`.
    """
    layer, separator, name = variable.name.rpartition(".")
    if not separator:
        return variable.name.removeprefix("state/")
    is_norm = any(other.name == f"{layer}.running_mean" for other in variables)
    keras_names = {
        "weight": "gamma" if is_norm else "kernel",
        "bias": "beta" if is_norm else "bias",
        **_KERAS_NAMES,
    }
    return f"{layer.replace('.', '_')}/{keras_names.get(name, name)}"


def _as_keras(array: np.ndarray, variable: Variable) -> np.ndarray:
    axes = _AXES.get(variable.layout)
    return np.ascontiguousarray(array.transpose(axes) if axes else array)


def _as_bytes(images: np.ndarray, script: ScriptTrace) -> np.ndarray:
    """Returns uint8 images from recorded images that were divided by 255."""
    if images.dtype != np.uint8:
        pixels = np.rint(images.astype(np.float64) * 255)
        if np.max(np.abs(images * 255.0 - pixels), initial=0) > 1e-3 or pixels.min() < 0:
            raise DataError(f"{script.name}: has images that are not bytes divided by 255")
        images = pixels.astype(np.uint8)
    return images.transpose(0, 2, 3, 1) if script.data_layout == "NCHW" else images
