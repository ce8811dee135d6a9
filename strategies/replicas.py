"""What the replicas of a strategy hold: read, written, compared and averaged.

The same code for every strategy, so that any of them can go on with what another one saved. Where
several workers train together each of them holds some of the replicas and calls all of this at
the same point.
"""

import abc
import itertools
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from strategies.workers import Workers, split_bytes

State = dict[str, np.ndarray]


class Replicas(abc.ABC):
    """R copies of a model and its optimizer, one on each device."""

    workers: Workers
    model: keras.Model  # This worker's first replica's, once built.
    optimizer: keras.optimizers.Optimizer  # Likewise.

    @property
    @abc.abstractmethod
    def num_replicas(self) -> int:
        """How many copies of the model are trained, one on each device, over all workers."""

    @property
    def local_replica_ids(self) -> range:
        """Which of the replicas are this worker's: all of them where it is alone."""
        num_local = self.num_replicas // self.workers.count
        return range(self.workers.index * num_local, (self.workers.index + 1) * num_local)

    @abc.abstractmethod
    def replica_variables(self) -> list[list[tf.Variable]]:
        """Returns what each replica of this worker holds, in the order of `variable_names`."""

    def gather_replicas(
        self, per_replica_arrays: Sequence[Sequence[np.ndarray]]
    ) -> list[list[np.ndarray]]:
        """Returns the arrays of all R replicas from those of each worker's own."""
        flat = [array for arrays in per_replica_arrays for array in arrays]
        num_local = len(per_replica_arrays)
        return [
            arrays[i * len(arrays) // num_local : (i + 1) * len(arrays) // num_local]
            for arrays in self.workers.gather_arrays(flat)
            for i in range(num_local)
        ]

    @property
    def variable_names(self) -> list[str]:
        """Names of everything that a replica holds: the model's variables, then the optimizer's.

        The optimizer's own name is left out: Keras numbers it anew for each one made.
        """
        names = [f"model/{variable.path}" for variable in self.model.variables]
        paths = [variable.path.partition("/")[2] for variable in self.optimizer.variables]
        return names + [f"optimizer/{path}" for path in paths]

    def replica_states(self) -> list[State]:
        """Returns what each replica of this worker holds, copies of the whole state."""
        names, per_replica = self.variable_names, _read(self.replica_variables())
        return [dict(zip(names, arrays, strict=True)) for arrays in per_replica]

    def state(self) -> State:
        """Returns the one copy that can be saved and that any other strategy can load.

        Replicas agree on all of it once their moving statistics are averaged, so it is replica 0's.
        """
        self.average_moving_statistics()
        variables = self.replica_variables()[0]
        return {name: v.numpy() for name, v in zip(self.variable_names, variables, strict=True)}

    def broadcast_state(self) -> None:
        """Gives every replica what the chief's first one holds."""
        own = [v.numpy() for v in self.replica_variables()[0]]
        message = self.workers.broadcast(b"".join(array.tobytes() for array in own))
        self.load_state(dict(zip(self.variable_names, split_bytes(message, own), strict=True)))

    def load_state(self, state: State) -> None:
        """Gives every replica of this worker `state`, by position: layer names play no part.

        Raises:
            ValueError: `state` has other shapes, or another number of arrays, than this model.
        """
        arrays = list(state.values())
        for variables in self.replica_variables():
            self._check_fits(variables, arrays)
            for variable, array in zip(variables, arrays, strict=True):
                variable.assign(array)

    def _check_fits(self, variables: Sequence[tf.Variable], arrays: Sequence[np.ndarray]) -> None:
        """Raises `ValueError` with the first three arrays of another type or shape."""

        def describe(value: tf.Variable | np.ndarray) -> str:
            return f"{value.dtype.name}{list(value.shape)}"

        found = [describe(array) for array in arrays]
        required = [describe(variable) for variable in variables]
        differing = [
            f"{name}: {f} for {r}"
            for name, f, r in itertools.zip_longest(
                self.variable_names, found, required, fillvalue="nothing"
            )
            if f != r
        ]
        if differing:
            raise ValueError(f"{len(differing)} arrays do not fit: {'; '.join(differing[:3])}")

    def average_moving_statistics(self) -> None:
        """Gives every replica the mean over the replicas of each BatchNorm moving statistic.

        In training each replica normalises with the statistics of its own shard and moves its own
        averages: they drift apart, and Keras would save replica 0's alone. The update of
        a moving average is linear, so averaging now or later ends, but for rounding, in the same.
        """
        own = self._statistics()
        for position, arrays in enumerate(zip(*self.gather_replicas(_read(own)), strict=True)):
            if all(np.array_equal(arrays[0], array) for array in arrays):
                continue  # A frozen weight, say: the mean of equal numbers could round.
            mean = np.mean(arrays, axis=0)
            for copies in own:
                copies[position].assign(mean)

    def per_replica_statistics(self) -> list[list[np.ndarray]]:
        """Returns each replica's own moving statistics, R lists, for `load_per_replica_statistics`.

        With them a training goes on bit for bit where `state`, which averages, was read in
        mid-epoch. None of them where all replicas hold the same.
        """
        per_replica = self.gather_replicas(_read(self._statistics()))
        first = per_replica[0]
        if all(
            np.array_equal(a, b)
            for arrays in per_replica
            for a, b in zip(arrays, first, strict=True)
        ):
            return []
        return per_replica

    def share_per_replica_statistics(
        self, per_replica_arrays: Sequence[Sequence[np.ndarray]]
    ) -> None:
        """Gives each replica of every worker its own statistics back, from the chief's copy.

        Args:
            per_replica_arrays: of all R replicas, or none; what others than the chief pass is not
                looked at.
        """
        if len(per_replica_arrays) not in (0, self.num_replicas):
            per_replica_arrays = []  # Of another number of replicas.
        flat = [array for arrays in per_replica_arrays for array in arrays]
        message = self.workers.broadcast(b"".join(array.tobytes() for array in flat))
        if message:
            likes = [v.numpy() for v in self._statistics()[0]]
            arrays = split_bytes(message, likes * self.num_replicas)
            starts = range(0, len(arrays), len(likes))
            self.load_per_replica_statistics([arrays[i : i + len(likes)] for i in starts])

    def load_per_replica_statistics(
        self, per_replica_arrays: Sequence[Sequence[np.ndarray]]
    ) -> None:
        """Gives each replica of this worker its own moving statistics back.

        Args:
            per_replica_arrays: of all R replicas, or none.

        Raises:
            ValueError: they are of another model or number of replicas.
        """
        if not per_replica_arrays:
            return
        own, ids = self._statistics(), self.local_replica_ids
        shapes = [copy.shape.as_list() for copy in own[0]]
        given = [[list(array.shape) for array in arrays] for arrays in per_replica_arrays]
        if given != [shapes] * self.num_replicas:
            raise ValueError("each replica's own statistics are of another model")
        for copies, arrays in zip(own, per_replica_arrays[ids.start : ids.stop], strict=True):
            for copy, array in zip(copies, arrays, strict=True):
                copy.assign(array)

    def _statistics(self) -> list[list[tf.Variable]]:
        """Returns each local replica's moving statistics; none where there is one replica alone."""
        if self.num_replicas == 1:
            return [[]]
        positions = [
            i
            for i, v in enumerate(self.model.variables)
            if not v.trainable and np.issubdtype(np.dtype(v.dtype), np.floating)
        ]
        return [[variables[i] for i in positions] for variables in self.replica_variables()]


def _read(per_replica_variables: Sequence[Sequence[tf.Variable]]) -> list[list[np.ndarray]]:
    return [[variable.numpy() for variable in variables] for variables in per_replica_variables]
