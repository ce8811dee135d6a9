"""Reads, assigns, gathers and averages the variables of all copies of the weights.

All strategies share this code, so that any strategy can load the state of any other.
"""

import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from strategies.base import Workers

State = dict[str, np.ndarray]
Variables = Mapping[str, tf.Variable]


class CopyStates:
    """Reads and writes the variables of a strategy's copies and shards; reading changes no state.

    Each worker holds some of the copies. `gather`, `averaged`, `averaged_statistics`,
    `per_shard_statistics` and `broadcast` communicate: all workers call them at the same point.

    Args:
        copies: `Strategy.copies()`.
        shards: `Strategy.shard_variables()`.
        num_shards: number of shards over all workers.
        workers: the processes that train together.

    Attributes:
        variable_names: names of all variables of a copy: the model's, then the optimizer's.
        statistics_names: names of the BatchNorm moving statistics.
    """

    def __init__(
        self,
        copies: Sequence[Variables],
        shards: Sequence[Variables],
        num_shards: int,
        workers: "Workers",
    ):
        self._copies, self._shards = copies, shards
        self._num_shards, self._workers = num_shards, workers
        self.variable_names = list(copies[0])
        # Random states are integers and are not averaged.
        self.statistics_names = [
            name
            for name in self.variable_names
            if name in shards[0] and tf.as_dtype(shards[0][name].dtype).is_floating
        ]

    def per_copy(self) -> list[State]:
        """Returns the state of each copy of this worker, with the copy's own moving statistics."""
        return [{name: v.numpy() for name, v in copy.items()} for copy in self._copies]

    def shard_statistics(self) -> list[Variables]:
        """Returns the moving statistics of each shard of this worker: name → variable."""
        return [{name: own[name] for name in self.statistics_names} for own in self._shards]

    def averaged(self) -> State:
        """Returns the state of the first copy, with moving statistics averaged over the shards."""
        averages = self.averaged_statistics()
        return {
            name: averages[name] if name in averages else variable.numpy()
            for name, variable in self._copies[0].items()
        }

    def load(self, state: State) -> None:
        """Assigns a state to every copy and shard of this worker; see `Strategy.load_state`."""
        found, required = (
            [f"{value.dtype.name}{list(value.shape)}" for value in values.values()]
            for values in (state, self._copies[0])
        )
        described = itertools.zip_longest(self.variable_names, found, required, fillvalue="nothing")
        differing = [f"{name}: {f} for {r}" for name, f, r in described if f != r]
        if differing:
            raise ValueError(f"{len(differing)} arrays do not fit: {'; '.join(differing[:3])}")
        by_name = dict(zip(self.variable_names, state.values(), strict=True))
        for variables in (*self._copies, *self._shards):
            for name, variable in variables.items():
                variable.assign(by_name[name])

    def broadcast(self, per_shard_arrays: Sequence[Sequence[np.ndarray]] = ()) -> None:
        """Assigns the chief's state to the copies and shards of every worker.

        Args:
            per_shard_arrays: moving statistics of all shards, or an empty list; ignored on workers
                other than the chief.
        """
        own = [variable.numpy() for variable in self._copies[0].values()]
        message = self._workers.broadcast(b"".join(array.tobytes() for array in own))
        self.load(dict(zip(self.variable_names, split_bytes(message, own), strict=True)))
        flat = [array for arrays in per_shard_arrays for array in arrays]
        message = self._workers.broadcast(b"".join(array.tobytes() for array in flat))
        if message:
            likes = [variable.numpy() for variable in self.shard_statistics()[0].values()]
            arrays = split_bytes(message, likes * self._num_shards)
            starts = range(0, len(arrays), len(likes))
            self.load_per_shard_statistics([arrays[i : i + len(likes)] for i in starts])

    def gather(self, per_item_arrays: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """Returns the arrays of all copies (or shards), given those of this worker."""
        flat = [array for arrays in per_item_arrays for array in arrays]
        num_local = len(per_item_arrays)
        return [
            arrays[i * len(arrays) // num_local : (i + 1) * len(arrays) // num_local]
            for arrays in self._workers.gather_arrays(flat)
            for i in range(num_local)
        ]

    def averaged_statistics(self) -> State:
        """Returns the mean over the shards of each BatchNorm moving statistic.

        In training, each shard updates its own moving averages. The update is linear: averaging
        when the mean is read gives the same result, but for rounding, as after each step.
        """
        per_statistic = zip(*self._gathered_statistics(), strict=True)
        # The mean of equal arrays could round: then the first one is taken.
        return {
            name: arrays[0] if _are_equal(arrays) else np.mean(arrays, axis=0)
            for name, arrays in zip(self.statistics_names, per_statistic, strict=True)
        }

    def per_shard_statistics(self) -> list[list[np.ndarray]]:
        """Returns the moving statistics of each shard, for `load_per_shard_statistics`.

        A resumed training needs them to be bitwise identical to an uninterrupted one. Empty if all
        shards have equal statistics.
        """
        per_shard = self._gathered_statistics()
        return [] if all(map(_are_equal, zip(*per_shard, strict=True))) else per_shard

    def _gathered_statistics(self) -> list[list[np.ndarray]]:
        """Returns the moving statistics of each shard; [] without BatchNorm."""
        if not self.statistics_names:
            return []
        own = self.shard_statistics()
        return self.gather([[variable.numpy() for variable in v.values()] for v in own])

    def load_per_shard_statistics(self, per_shard_arrays: Sequence[Sequence[np.ndarray]]) -> None:
        """Assigns its moving statistics to each shard of this worker, given those of all shards.

        An empty list changes nothing; another one that does not fit raises `ValueError`.
        """
        if not per_shard_arrays:
            return
        own, ids = self.shard_statistics(), self._workers.local_range(self._num_shards)
        if len(per_shard_arrays) != self._num_shards:
            given, needed = len(per_shard_arrays), self._num_shards
            raise ValueError(f"BatchNorm statistics of {given} replicas instead of {needed}")
        shapes = [list(variable.shape) for variable in own[0].values()]
        if any([list(a.shape) for a in arrays] != shapes for arrays in per_shard_arrays):
            raise ValueError("the per-replica BatchNorm statistics are those of another model")
        for variables, arrays in zip(own, per_shard_arrays[ids.start : ids.stop], strict=True):
            for variable, array in zip(variables.values(), arrays, strict=True):
                variable.assign(array)


def _are_equal(arrays: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(arrays[0], array) for array in arrays)


def named_variables(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Variables:
    """Returns name → variable for a copy: the model's variables, then the optimizer's."""
    names = [f"model/{variable.path}" for variable in model.variables] + optimizer_names(optimizer)
    variables = [variable.value for variable in model.variables + optimizer.variables]
    return dict(zip(names, variables, strict=True))


def optimizer_names(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Returns the names of the variables of an optimizer, without the optimizer's own name.

    Keras numbers the optimizers of a process, so that their names differ between copies.
    """
    names, seen = [], collections.Counter[str]()
    for variable in optimizer.variables:
        path = variable.path.partition("/")[2]
        seen[path] += 1
        # Adafactor has two variables of the same name for each weight.
        names.append(f"optimizer/{path}" + (f"_{seen[path]}" if seen[path] > 1 else ""))
    return names


def split_bytes(message: bytes, likes: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Splits the concatenated bytes of arrays with the shapes and dtypes of `likes`."""
    ends = np.cumsum([like.nbytes for like in likes], dtype=np.int64).tolist()
    return [
        np.frombuffer(message[end - like.nbytes : end], like.dtype).reshape(like.shape)
        for like, end in zip(likes, ends, strict=True)
    ]
