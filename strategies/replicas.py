"""What the replicas of a strategy hold: read, written, compared and averaged.

The same code for every strategy, so that any of them can go on with what another one saved.
"""

import abc
import itertools
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

State = dict[str, np.ndarray]


class Replicas(abc.ABC):
    """R copies of a model and its optimizer, one on each device."""

    model: keras.Model  # Replica 0's, once built.
    optimizer: keras.optimizers.Optimizer  # Replica 0's, once built.

    @property
    @abc.abstractmethod
    def num_replicas(self) -> int:
        """How many copies of the model are trained, one on each device."""

    @abc.abstractmethod
    def replica_variables(self) -> list[list[tf.Variable]]:
        """Returns R lists: what each replica holds, in the order of `variable_names`."""

    @property
    def variable_names(self) -> list[str]:
        """Names of everything that a replica holds: the model's variables, then the optimizer's.

        The optimizer's own name is left out: Keras numbers it anew for each one made.
        """
        names = [f"model/{variable.path}" for variable in self.model.variables]
        paths = [variable.path.partition("/")[2] for variable in self.optimizer.variables]
        return names + [f"optimizer/{path}" for path in paths]

    def replica_states(self) -> list[State]:
        """Returns what each replica holds, R copies of the whole state, read from its device."""
        return [
            {name: v.numpy() for name, v in zip(self.variable_names, variables, strict=True)}
            for variables in self.replica_variables()
        ]

    def state(self) -> State:
        """Returns the one copy that can be saved and that any other strategy can load.

        Replicas agree on all of it once their moving statistics are averaged, so it is replica 0's.
        """
        self.average_moving_statistics()
        variables = self.replica_variables()[0]
        return {name: v.numpy() for name, v in zip(self.variable_names, variables, strict=True)}

    def load_state(self, state: State) -> None:
        """Gives every replica the values of `state`, by position: layer names play no part.

        Raises:
            ValueError: `state` has other shapes, or another number of arrays, than this model.
        """
        arrays = list(state.values())
        for variables in self.replica_variables():
            self._check_fits(variables, arrays)
            for variable, array in zip(variables, arrays, strict=True):
                variable.assign(array)

    def _check_fits(self, variables, arrays) -> None:
        """Raises `ValueError` with the first three arrays of another type or shape."""

        def describe(value):
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
        for copies in self._statistics():
            arrays = [copy.numpy() for copy in copies]
            if all(np.array_equal(arrays[0], array) for array in arrays):
                continue  # A frozen weight, say: the mean of equal numbers could round.
            mean = np.mean(arrays, axis=0)
            for copy in copies:
                copy.assign(mean)

    def replica_statistics(self) -> list[list[np.ndarray]]:
        """Returns each replica's own moving statistics, R lists, for `load_replica_statistics`.

        With them a training goes on bit for bit where `state`, which averages, was read in
        mid-epoch. None of them where all replicas hold the same.
        """
        per_variable = [[copy.numpy() for copy in copies] for copies in self._statistics()]
        if all(np.array_equal(arrays[0], array) for arrays in per_variable for array in arrays):
            return []
        return [list(arrays) for arrays in zip(*per_variable, strict=True)]

    def load_replica_statistics(self, per_replica_arrays: Sequence[Sequence[np.ndarray]]) -> None:
        """Gives each replica its own moving statistics back.

        Raises:
            ValueError: they are of another model or number of replicas.
        """
        if not per_replica_arrays:
            return
        per_replica_copies = list(zip(*self._statistics(), strict=True))
        shapes = [[copy.shape.as_list() for copy in copies] for copies in per_replica_copies]
        if shapes != [[list(array.shape) for array in arrays] for arrays in per_replica_arrays]:
            raise ValueError("each replica's own statistics are of another model")
        for copies, arrays in zip(per_replica_copies, per_replica_arrays, strict=True):
            for copy, array in zip(copies, arrays, strict=True):
                copy.assign(array)

    def _statistics(self) -> list[list[tf.Variable]]:
        """Returns, for each moving statistic, its copy on each replica; none for one replica."""
        if self.num_replicas == 1:
            return []
        replicas = self.replica_variables()
        return [
            [variables[i] for variables in replicas]
            for i, v in enumerate(self.model.variables)
            if not v.trainable and np.issubdtype(np.dtype(v.dtype), np.floating)
        ]
