"""The copies of the weights that a strategy trains: read, written, gathered, averaged.

The same code for every strategy, so that any of them can load the state that another one saved.
Where several workers train together, each of them holds some of the copies, and all of them call
these methods at the same point. Reading changes nothing.
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
    """Copies of a model and its optimizer on some devices.

    Attributes:
        num_devices: devices, over all workers.
        num_shards: parts of a global batch; each has its own examples, loss, gradients and
            BatchNorm statistics.
        num_copies: copies of the weights, over all workers.
        workers: the processes that train together.
        observer: to be replaced before the first step, if at all.
        model: of the first copy on this worker, once built.
        optimizer: of the first copy on this worker, once built.

    `gather`, `state`, `averaged_statistics`, `per_shard_statistics` and all names that begin with
    `broadcast_` communicate: every worker has to call them at the same point.
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
        """Returns what each shard of this worker has of its own: name → variable.

        Those are the model's variables that are not trained: moving statistics, random states.
        """
        names = [f"model/{v.path}" for v in self.model.variables if not v.trainable]
        return [{name: copy[name] for name in names} for copy in self.copies()]

    def shard_statistics(self) -> list[Variables]:
        """Returns the moving statistics of each shard of this worker: name → variable."""
        names = self.statistics_names
        return [{name: own[name] for name in names} for own in self.shard_variables()]

    @property
    def local_copy_ids(self) -> range:
        """The copies that this worker holds: all of them where it is the only worker."""
        return self._local(self.num_copies)

    @property
    def local_shard_ids(self) -> range:
        """The shards that this worker trains on: all of them where it is the only worker."""
        return self._local(self.num_shards)

    def _local(self, count: int) -> range:
        num_local, rest = divmod(count, self.workers.count)
        if rest:
            raise ValueError(f"{count} cannot be divided among {self.workers.count} workers")
        return range(self.workers.index * num_local, (self.workers.index + 1) * num_local)

    def named_variables(
        self, model: keras.Model, optimizer: keras.optimizers.Optimizer
    ) -> Variables:
        """Returns the variables of a copy, with their names."""
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
        """Returns the arrays of all copies, or shards, from those of each worker's own."""
        flat = [array for arrays in per_item_arrays for array in arrays]
        num_local = len(per_item_arrays)
        return [
            arrays[i * len(arrays) // num_local : (i + 1) * len(arrays) // num_local]
            for arrays in self.workers.gather_arrays(flat)
            for i in range(num_local)
        ]

    def copy_states(self) -> list[State]:
        """Returns the state of each copy of this worker, with its own moving statistics."""
        return [{name: v.numpy() for name, v in copy.items()} for copy in self.copies()]

    def state(self) -> State:
        """Returns the state that is saved, which any other strategy can load.

        It is that of the first copy, with moving statistics that are averaged over the shards.
        """
        averages = self.averaged_statistics()
        return {
            name: averages[name] if name in averages else variable.numpy()
            for name, variable in self.copies()[0].items()
        }

    def load_state(self, state: State) -> None:
        """Assigns a state to every copy and shard of this worker.

        Arrays are assigned by position: the names of layers do not matter.

        Raises:
            ValueError: `state` has other shapes, or another number of arrays, than this model.
        """
        arrays = list(state.values())
        self._check_fits(arrays)
        by_name = dict(zip(self.variable_names, arrays, strict=True))
        for variables in (*self.copies(), *self.shard_variables()):
            for name, variable in variables.items():
                variable.assign(by_name[name])

    def _check_fits(self, arrays: Sequence[np.ndarray]) -> None:
        """Raises `ValueError` with the first three arrays of another type or shape."""

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

        In training each shard is normalised by its own statistics and moves its own averages, so
        that those of different shards differ. The update of a moving average is linear: averaging
        whenever the mean is read gives the same, but for rounding, as averaging after each step.
        """
        if not self.statistics_names:
            return {}
        per_shard = self.gather(_read(self.shard_statistics()))
        averages = {
            # Of equal numbers, a frozen weight for example, the mean could round.
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

        A training that resumes needs them to be bitwise identical to one that was not interrupted.
        Empty where all shards have the same.
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
        """Assigns to each shard of this worker its own moving statistics.

        Args:
            per_shard_arrays: of all shards, or none.

        Raises:
            ValueError: they are of another model or number of shards.
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
        """Assigns to each shard of every worker its own statistics, from the chief's argument.

        Args:
            per_shard_arrays: of all shards, or none; ignored on workers other than the chief, and
                where it is of another number of shards.
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
    """Returns the names of the variables of an optimizer.

    Its own name is left out: Keras numbers the optimizers of a process.
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
    """Returns name → shape of the variables of an optimizer of whole weights.

    It is built and dropped: for strategies that have no such optimizer.
    """
    optimizer = optimizer_fn()
    optimizer.build(list(variables))
    shapes = [tuple(variable.shape) for variable in optimizer.variables]
    return dict(zip(optimizer_names(optimizer), shapes, strict=True))


def _read(per_item_variables: Sequence[Variables]) -> list[list[np.ndarray]]:
    return [[variable.numpy() for variable in v.values()] for v in per_item_variables]
