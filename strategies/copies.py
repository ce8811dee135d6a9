"""Reads, assigns, gathers and averages the copies of the weights of a strategy.

All strategies share this code, so that any strategy can load the state of any other. With several
workers, each worker holds some of the copies, and all workers call these methods at the same point.
Reading changes no state.
"""

import abc
import collections
import itertools
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from strategies.observer import Observer
from strategies.workers import Workers, split_bytes

State = dict[str, np.ndarray]
Variables = Mapping[str, tf.Variable]


class Copies(abc.ABC):
    """Holds copies of a model and its optimizer on one or more devices.

    `gather`, `state`, `averaged_statistics`, `per_shard_statistics` and all methods that begin with
    `broadcast_` communicate: every worker must call them at the same point.

    Attributes:
        num_devices: number of devices, over all workers.
        num_shards: number of shards of a global batch; each has its own examples, loss, gradients
            and BatchNorm statistics.
        num_copies: number of copies of the weights, over all workers.
        workers: the processes that train together.
        observer: hooks of the training step; replace it only before the first step.
        model: the model of the first copy on this worker, after `build`.
        optimizer: the optimizer of the first copy on this worker, after `build`.
    """

    num_devices: int
    num_shards: int
    num_copies: int
    workers: Workers
    observer: Observer
    model: keras.Model
    optimizer: keras.optimizers.Optimizer

    @abc.abstractmethod
    def copies(self) -> list[Variables]:
        """Returns the variables of each copy on this worker: name → variable.

        The order is that of `variable_names`: the model's variables, then the optimizer's.
        """

    def shard_variables(self) -> list[Variables]:
        """Returns the per-shard variables of each shard of this worker: name → variable.

        These are the model's non-trainable variables: moving statistics and random states.
        """
        names = [f"model/{v.path}" for v in self.model.variables if not v.trainable]
        return [{name: copy[name] for name in names} for copy in self.copies()]

    def shard_statistics(self) -> list[Variables]:
        """Returns the moving statistics of each shard of this worker: name → variable."""
        names = self.statistics_names
        return [{name: own[name] for name in names} for own in self.shard_variables()]

    @property
    def local_copy_ids(self) -> range:
        """Ids of the copies that this worker holds; all copies for a single worker."""
        return self._local(self.num_copies)

    @property
    def local_shard_ids(self) -> range:
        """Ids of the shards that this worker trains on; all shards for a single worker."""
        return self._local(self.num_shards)

    def _local(self, count: int) -> range:
        num_local, rest = divmod(count, self.workers.count)
        if rest:
            raise ValueError(f"{count} cannot be divided among {self.workers.count} workers")
        return range(self.workers.index * num_local, (self.workers.index + 1) * num_local)

    def named_variables(
        self, model: keras.Model, optimizer: keras.optimizers.Optimizer
    ) -> Variables:
        """Returns name → variable for the variables of a copy."""
        variables = [variable.value for variable in model.variables + optimizer.variables]
        return dict(zip(self.variable_names, variables, strict=True))

    @property
    def variable_names(self) -> list[str]:
        """Names of all variables of a copy: the model's, then the optimizer's."""
        names = [f"model/{variable.path}" for variable in self.model.variables]
        return names + optimizer_names(self.optimizer)

    @property
    def statistics_names(self) -> list[str]:
        """Names of the BatchNorm moving statistics."""
        return [
            f"model/{variable.path}"
            for variable in self.model.variables
            if not variable.trainable and np.issubdtype(np.dtype(variable.dtype), np.floating)
        ]

    def gather(self, per_item_arrays: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """Returns the arrays of all copies (or shards), given those of this worker."""
        flat = [array for arrays in per_item_arrays for array in arrays]
        num_local = len(per_item_arrays)
        return [
            arrays[i * len(arrays) // num_local : (i + 1) * len(arrays) // num_local]
            for arrays in self.workers.gather_arrays(flat)
            for i in range(num_local)
        ]

    def copy_states(self) -> list[State]:
        """Returns the state of each copy of this worker, with the copy's own moving statistics."""
        return [{name: v.numpy() for name, v in copy.items()} for copy in self.copies()]

    def state(self) -> State:
        """Returns the state to save, which any other strategy can load.

        The state of the first copy, with moving statistics averaged over the shards.
        """
        averages = self.averaged_statistics()
        return {
            name: averages[name] if name in averages else variable.numpy()
            for name, variable in self.copies()[0].items()
        }

    def load_state(self, state: State) -> None:
        """Assigns a state to every copy and shard of this worker.

        Arrays are assigned by position; layer names are ignored.

        Raises:
            ValueError: `state` does not have the number and shapes of this model's arrays.
        """
        arrays = list(state.values())
        self._check_fits(arrays)
        by_name = dict(zip(self.variable_names, arrays, strict=True))
        for variables in (*self.copies(), *self.shard_variables()):
            for name, variable in variables.items():
                variable.assign(by_name[name])

    def _check_fits(self, arrays: Sequence[np.ndarray]) -> None:
        """Raises `ValueError` that names the first three arrays whose dtype or shape differs."""

        def describe(value: tf.Variable | np.ndarray) -> str:
            return f"{value.dtype.name}{list(value.shape)}"

        found = [describe(array) for array in arrays]
        required = [describe(variable) for variable in self.copies()[0].values()]
        differing = [
            f"{name}: {f} for {r}"
            for name, f, r in itertools.zip_longest(
                self.variable_names, found, required, fillvalue="nothing"
            )
            if f != r
        ]
        if differing:
            raise ValueError(f"{len(differing)} arrays do not fit: {'; '.join(differing[:3])}")

    def broadcast_state(self) -> None:
        """Assigns the state of the chief's first copy to every copy of every worker."""
        own = list(self.copy_states()[0].values())
        message = self.workers.broadcast(b"".join(array.tobytes() for array in own))
        self.load_state(dict(zip(self.variable_names, split_bytes(message, own), strict=True)))

    def averaged_statistics(self) -> State:
        """Returns the mean over the shards of each BatchNorm moving statistic.

        In training, each shard is normalised by its own statistics and updates its own moving
        averages, so that the averages of shards differ. The update is linear: averaging when the
        mean is read gives the same result, except for rounding, as averaging after each step.
        """
        if not self.statistics_names:
            return {}
        per_shard = self.gather(_read(self.shard_statistics()))
        averages = {
            # The mean of equal numbers, of a frozen weight for example, could round.
            name: arrays[0]
            if all(np.array_equal(arrays[0], array) for array in arrays)
            else np.mean(arrays, axis=0)
            for name, arrays in zip(
                self.statistics_names, zip(*per_shard, strict=True), strict=True
            )
        }
        return dict(self.observer.on_average(per_shard, averages))

    def per_shard_statistics(self) -> list[list[np.ndarray]]:
        """Returns the moving statistics of each shard, for `load_per_shard_statistics`.

        A resumed training needs them to be bitwise identical to an uninterrupted one. Empty if all
        shards have equal statistics.
        """
        if not self.statistics_names:
            return []
        per_shard = self.gather(_read(self.shard_statistics()))
        first = per_shard[0]
        if all(
            np.array_equal(a, b) for arrays in per_shard for a, b in zip(arrays, first, strict=True)
        ):
            return []
        return per_shard

    def load_per_shard_statistics(self, per_shard_arrays: Sequence[Sequence[np.ndarray]]) -> None:
        """Assigns the moving statistics of each shard of this worker.

        Args:
            per_shard_arrays: the arrays of all shards, or an empty list.

        Raises:
            ValueError: the arrays do not fit this model or its number of shards.
        """
        if not per_shard_arrays:
            return
        own, ids = self.shard_statistics(), self.local_shard_ids
        if len(per_shard_arrays) != self.num_shards:
            raise ValueError(
                f"BatchNorm statistics of {len(per_shard_arrays)} replicas instead of"
                f" {self.num_shards}"
            )
        shapes = [list(variable.shape) for variable in own[0].values()]
        if any([list(a.shape) for a in arrays] != shapes for arrays in per_shard_arrays):
            raise ValueError("the per-replica BatchNorm statistics are those of another model")
        for variables, arrays in zip(own, per_shard_arrays[ids.start : ids.stop], strict=True):
            for variable, array in zip(variables.values(), arrays, strict=True):
                variable.assign(array)

    def broadcast_per_shard_statistics(
        self, per_shard_arrays: Sequence[Sequence[np.ndarray]]
    ) -> None:
        """Assigns the chief's per-shard statistics to the shards of every worker.

        Args:
            per_shard_arrays: the arrays of all shards, or an empty list; ignored on workers other
                than the chief, and if the number of shards differs.
        """
        if len(per_shard_arrays) != self.num_shards:
            per_shard_arrays = []
        flat = [array for arrays in per_shard_arrays for array in arrays]
        message = self.workers.broadcast(b"".join(array.tobytes() for array in flat))
        if message:
            likes = [variable.numpy() for variable in self.shard_statistics()[0].values()]
            arrays = split_bytes(message, likes * self.num_shards)
            starts = range(0, len(arrays), len(likes))
            self.load_per_shard_statistics([arrays[i : i + len(likes)] for i in starts])


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


def optimizer_shapes(
    variables: Sequence[keras.Variable], optimizer_fn: Callable[[], keras.optimizers.Optimizer]
) -> dict[str, tuple[int, ...]]:
    """Returns name → shape of the variables of an optimizer for unsplit weights.

    Builds the optimizer and discards it, for strategies whose optimizers hold parts of weights.
    """
    optimizer = optimizer_fn()
    optimizer.build(list(variables))
    shapes = [tuple(variable.shape) for variable in optimizer.variables]
    return dict(zip(optimizer_names(optimizer), shapes, strict=True))


def _read(per_item_variables: Sequence[Variables]) -> list[list[np.ndarray]]:
    return [[variable.numpy() for variable in v.values()] for v in per_item_variables]
