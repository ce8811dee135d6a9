"""Converts the recording of another framework to a trace with the names of our own trainings.

Names and layouts become those of Keras. A gradient becomes the replica's part of the gradient of
the mean loss over the global batch: if the all-reduce averages over R replicas, 1 / R of the
recorded gradient. With JAX's `jit` and shardings, replicas have no gradients of their own; the
whole batch is then one shard, whose gradient is the sum.
"""

import collections
import pathlib
from collections.abc import Sequence

import numpy as np

from app.runtime.errors import DataError
from lockstep import trace_file
from lockstep.arithmetic import plain
from lockstep.trace import STATE, STATISTIC, WEIGHT, About, Named, Shard, Trace, Variable

# Axes of another framework's layout, in the order of Keras.
_AXES = {"OIHW": (2, 3, 1, 0), "OI": (1, 0)}
_KERAS_NAMES = {"running_mean": "moving_mean", "running_var": "moving_variance"}
_STATE = ("optimizer/iteration", "optimizer/learning_rate")
_NO_LABEL = 255  # Of an image that is not in the training set.


def convert(
    script: Trace, path: pathlib.Path, names: Sequence[str], images: np.ndarray,
    labels: np.ndarray, *, syncs_batch_norm: bool,
) -> About:  # fmt: skip
    """Writes the converted trace to `path`, and returns its description.

    Args:
        script: the recording.
        path: file of the converted trace.
        names: Keras names of weights and statistics, in the order of the model.
        images: uint8 `(n, height, width, channels)`, the training set.
        labels: integers `(n,)`. A recording of PyTorch has the arguments of the model, images
            without labels; a wrong label shows in the loss.
        syncs_batch_norm: whether BatchNorm normalises over all shards.

    Raises:
        DataError: the recording is incomplete.
    """
    if list(script.steps) != list(range(len(script.steps))):
        raise DataError(f"{script.name}: steps {script.steps} do not follow each other from 0")
    recording = _Recording(script, names, images, labels)
    num_shards, about = recording.num_shards, script.about
    sizes = [len(recording.examples(0, shard)[1]) for shard in range(num_shards)]
    kinds = [Variable(name, variable.kind) for name, variable in recording.variables.items()]
    converted = About(
        about.framework,
        about.num_replicas if recording.has_shards else 1,
        steps=about.steps,
        variables=(*kinds, *(Variable(n, STATE, slot=n.rpartition("/")[2]) for n in _STATE)),
        gradients=tuple(recording.names_of(WEIGHT)),
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
    with trace_file.Writer(path) as writer:
        trace = Trace(converted, writer)
        for position in range(len(trace.steps)):
            recording.put_state(trace, position, "before")
            recording.put_step(trace, position)
            recording.put_state(trace, position, "after")
        writer.close(converted)
    return converted


class _Recording:
    """Reads a recording by Keras name; see `convert` for the arguments."""

    def __init__(self, script: Trace, names: Sequence[str], images: np.ndarray, labels: np.ndarray):
        self._script = script
        variables = script.about.variables
        by_name = {_keras_name(each, variables): each for each in variables}
        if missing := [name for name in names if name not in by_name]:
            raise DataError(f"{script.name}: has no variable {missing[0]}; record the same model")
        self.variables = {name: by_name[name] for name in names}
        self.has_shards = script.has(0, "raw")
        self.num_shards = script.about.num_replicas if self.has_shards else 1
        self._labels: dict[bytes, collections.deque[int]] = collections.defaultdict(
            collections.deque
        )
        for image, label in zip(images, labels, strict=True):
            self._labels[image.tobytes()].append(int(label))

    def names_of(self, kind: str) -> list[str]:
        """Returns the Keras names of the variables of a kind."""
        return [name for name, variable in self.variables.items() if variable.kind == kind]

    def put_step(self, trace: Trace, position: int) -> None:
        """Adds what a step has computed."""
        averages = self.has_shards and self._script.about.reduction == "mean"
        divisor = np.float32(self.num_shards if averages else 1)
        for shard in trace.shards:
            loss = self._arrays(position, "loss", shard)[0] / divisor
            raw = self._gradients(position, "raw" if self.has_shards else "sums", shard)
            trace.put(position, "data", shard, self.examples(position, shard))
            trace.put(position, "loss", shard, [loss, np.zeros((), loss.dtype)])
            trace.put(position, "raw", shard, [gradient / divisor for gradient in raw])
        # Without an all-reduce, the gradients that each replica's optimizer applies.
        kind = "sums" if self._script.has(position, "sums") else "clipped"
        for copy in trace.copies:
            trace.put(position, "sums", copy, self._gradients(position, kind, copy))

    def put_state(self, trace: Trace, position: int, when: str) -> None:
        """Adds weights, statistics and the optimizer's state "before" or "after" a step."""
        rates = {group["learning_rate"] for group in self._script.about.settings[position]}
        if len(rates) != 1:
            raise DataError(f"{self._script.name}: has {len(rates)} learning rates; use one")
        num_updates = np.array(position + (when == "after"), np.int64)
        slots = [num_updates, np.array(rates.pop(), np.float32)]
        states = [self._state(position, when, copy) for copy in trace.copies]
        statistics = self.names_of(STATISTIC)
        mean = {n: np.mean([states[s][n] for s in trace.shards], axis=0) for n in statistics}
        for copy, state in enumerate(states):
            trace.put(position, when, copy, [*(state | mean).values(), *slots])
        for shard in trace.shards if statistics and self.num_shards > 1 else ():
            own = [states[shard][n] if n in mean else None for n in self.variables]
            trace.put(position, f"own_{when}", shard, own)

    def _state(self, position: int, when: str, copy: int) -> Named:
        arrays = dict(zip(self._script.keys, self._arrays(position, when, copy), strict=True))
        return {n: _as_keras(arrays[v.name], v) for n, v in self.variables.items()}

    def _gradients(self, position: int, kind: str, item: int) -> list[np.ndarray]:
        arrays = self._arrays(position, kind, item)
        found = dict(zip(self._script.about.gradients, arrays, strict=True))
        weights = (self.variables[name] for name in self.names_of(WEIGHT))
        return [_as_keras(found[variable.name], variable) for variable in weights]

    def examples(self, position: int, shard: int) -> list[np.ndarray]:
        """Returns uint8 images `(n, height, width, channels)` and labels `(n,)` of a shard."""
        replicas = [shard] if self.has_shards else range(self._script.about.num_replicas)
        data = [self._arrays(position, "data", replica) for replica in replicas]
        images = np.concatenate([_as_bytes(arrays[0], self._script) for arrays in data])
        if len(data[0]) > 1:
            labels = np.concatenate([np.ravel(arrays[1]) for arrays in data])
        else:
            labels = np.array([self._label_of(image.tobytes()) for image in images])
        return [images, labels.astype(np.int32)]

    def _label_of(self, image: bytes) -> int:
        """Returns the label of an image; of equal images with several labels, one after another."""
        if image not in self._labels:
            return _NO_LABEL
        self._labels[image].rotate(-1)
        return self._labels[image][-1]

    def _arrays(self, position: int, kind: str, item: int) -> list[np.ndarray]:
        arrays = self._script.arrays(position, kind, item)
        if arrays is None:
            raise DataError(
                f"{self._script.name}: has no {kind!r} of replica {item} in step {position};"
                " record it again"
            )
        return arrays


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
    return np.ascontiguousarray(plain(array).transpose(axes) if axes else plain(array))


def _as_bytes(images: np.ndarray, script: Trace) -> np.ndarray:
    """Returns uint8 images from recorded images that were divided by 255."""
    if images.dtype != np.uint8:
        pixels = np.rint(images.astype(np.float64) * 255)
        if np.max(np.abs(images * 255.0 - pixels), initial=0) > 1e-3 or pixels.min() < 0:
            raise DataError(f"{script.name}: has images that are not bytes divided by 255")
        images = pixels.astype(np.uint8)
    return images.transpose(0, 2, 3, 1) if script.about.data_layout == "NCHW" else images
