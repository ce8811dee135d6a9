"""The recording of a small training that NumPy computes; `changes.py` has what may be changed."""

import copy
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.data.file import save
from lockstep.data.trace import STATE, STATISTIC, WEIGHT, About, Trace, Variable

NUM_EXAMPLES, BATCH, FEATURES, OUTPUTS = 40, 16, 12, 3
STEPS_PER_EPOCH = 3  # Batches of 16, 16 and 8.
WEIGHTS = ("dense/kernel", "dense/bias")
NORM = "norm/moving_mean", "norm/moving_variance"
SLOTS = {"SGD": ("momentum_buffer",), "Adam": ("exp_avg", "exp_avg_sq", "step")}

Arrays = list[np.ndarray]


def examples() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(NUM_EXAMPLES, FEATURES)).astype(np.float32)
    return inputs, generator.normal(size=(NUM_EXAMPLES, OUTPUTS)).astype(np.float32)


def batch_of(step: int) -> np.ndarray:
    """Returns the indices of the examples of a step; each epoch has another order."""
    epoch, number = divmod(step, STEPS_PER_EPOCH)
    order = np.random.default_rng(100 + epoch).permutation(NUM_EXAMPLES)
    return order[number * BATCH : (number + 1) * BATCH]


def split_evenly(rows: np.ndarray, replica: int, count: int) -> np.ndarray:
    return rows[replica::count]


def mean_of(sent: Sequence[Arrays]) -> list[Arrays]:
    """Returns the mean of the sent values for each replica."""
    count = np.float32(len(sent))
    return [[sum(parts) / count for parts in zip(*sent, strict=True)] for _ in sent]


def sgd(script: "Script", weights: Arrays, gradients: Arrays, state: Arrays) -> None:
    """Updates weights and momentum in place in float32, as `torch.optim.SGD` does."""
    s = script.settings
    for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        gradient = gradient + np.float32(s["weight_decay"]) * weight
        state[i][:] = np.float32(s["momentum"]) * state[i] + gradient
        ahead = gradient + np.float32(s["momentum"]) * state[i]
        weight -= np.float32(s["learning_rate"]) * (ahead if s["nesterov"] else state[i])


def adam(script: "Script", weights: Arrays, gradients: Arrays, state: Arrays) -> None:
    s = script.settings
    for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        first, second, number = state[3 * i : 3 * i + 3]
        number += 1
        first[:] = s["beta_1"] * first + (1 - s["beta_1"]) * gradient
        second[:] = s["beta_2"] * second + (1 - s["beta_2"]) * gradient**2
        weight *= np.float32(1 - s["learning_rate"] * s["weight_decay"])
        left = np.float32(1 - s["beta_2"] ** float(number))
        if script.framework == "keras":
            root = (np.sqrt(second) + np.float32(s["epsilon"])) / np.sqrt(left)
        else:
            root = np.sqrt(second / left) + np.float32(s["epsilon"])
        rate = np.float32(s["learning_rate"] / (1 - s["beta_1"] ** float(number)))
        weight -= rate * first / root


UPDATES = {"SGD": sgd, "Adam": adam}


@dataclasses.dataclass
class Script:
    """A training of a linear model with the mean squared error, recorded.

    Callables are what a fault replaces: `shard(rows, replica, count)`, `reduce(sent)`,
    `clip(replica, gradients)`, `gradient(script, replica, gradients)`, `update(...)`.
    """

    replicas: int = 1
    framework: str = "torch"
    optimizer: str = "SGD"
    steps: Sequence[int] = (0, 1, 2, 3)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    of_replica: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)  # Settings.
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0
    initial_scale: float = 0.1
    replay: "Script | None" = None
    permute: int | None = None
    batch: Callable = batch_of
    shard: Callable = split_evenly
    inputs: Callable = lambda x: x
    gradient: Callable = lambda script, replica, gradients: gradients
    reduce: Callable | None = mean_of
    clip: Callable = lambda replica, gradients: gradients
    norm_momentum: float = 0.1
    unbiased: bool = False
    local_norm: bool = False
    weighted: bool = True  # Replicas are weighted by their examples, as is correct.
    update: Callable | None = None
    edit: Callable = lambda script: None  # Changes the arrays of the recording.
    more_variables: Sequence[Variable] = ()

    def __post_init__(self):
        given = {"learning_rate": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0}
        if self.optimizer == "Adam":
            given = {"learning_rate": 0.01, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}
            given["weight_decay"] = 0.0
        self.settings = given | self.settings
        self.states: dict[int, list[Arrays]] = {}  # Step → the state of each replica before it.
        self.arrays: dict[str, np.ndarray] = {}
        self._train()
        self.edit(self)

    def _start(self) -> Arrays:
        generator = np.random.default_rng(self.seed)
        kernel = generator.normal(size=(FEATURES, OUTPUTS)) * self.initial_scale
        weights = [kernel.astype(np.float32), np.zeros(OUTPUTS, np.float32)]
        statistics = [np.zeros(FEATURES, np.float32), np.ones(FEATURES, np.float32)]
        slots = [
            np.zeros((), np.float32) if slot == "step" else np.zeros_like(weight)
            for weight in weights
            for slot in SLOTS[self.optimizer]
        ]
        return [*weights, *statistics, *slots]

    def _train(self) -> None:
        states = [self._start() for _ in range(self.replicas)]
        for step in range(max(self.steps) + 1):
            if self.replay is not None and step in self.replay.states:
                states = [[a.copy() for a in self.replay.states[step][0]] for _ in states]
            self.states[step] = [[array.copy() for array in state] for state in states]
            if step in self.steps:
                self._keep(step, "before", states)
            self._train_step(step, states)
            if step in self.steps:
                self._keep(step, "after", states)

    def _train_step(self, step: int, states: list[Arrays]) -> None:
        inputs, targets = examples()
        rows = self.batch(step)
        shards = [self.shard(rows, r, self.replicas) for r in range(self.replicas)]
        if self.permute is not None:
            generator = np.random.default_rng(self.permute)
            shards = [generator.permutation(shard) for shard in shards]
        x = [self.inputs(inputs[shard]) for shard in shards]
        sent, losses = [], []
        for replica, shard in enumerate(shards):
            kernel, bias = states[replica][:2]
            wrong = x[replica] @ kernel + bias - targets[shard]
            share = len(shard) * self.replicas / len(rows) if self.weighted else 1
            size = max(wrong.size, 1)
            scale = np.float32(2 * share / size)
            own = [scale * (x[replica].T @ wrong), scale * wrong.sum(axis=0)]
            sent.append([g.astype(np.float32) for g in self.gradient(self, replica, own)])
            losses.append([np.float32(np.sum(wrong**2) / size)])
        sums = self.reduce(sent) if self.reduce else sent
        applied = [
            self.clip(replica, [array.copy() for array in sums[replica]])
            for replica in range(self.replicas)
        ]
        self._normalise(x, states)
        update = self.update or UPDATES[self.optimizer]
        for replica, (state, gradients) in enumerate(zip(states, applied, strict=True)):
            own = copy.copy(self)
            own.settings = self.settings | self.of_replica.get(replica, {})
            update(own, state[:2], gradients, state[4:])
        if step in self.steps:
            for kind, arrays in (
                ("data", [[array] for array in x]), ("loss", losses), ("raw", sent),
                ("sums", sums), ("clipped", applied),
            ):  # fmt: skip
                self._keep(step, kind, arrays)

    def _normalise(self, x: list[np.ndarray], states: list[Arrays]) -> None:
        """Updates the moving statistics with those of the batch, or of each replica's part."""
        for replica, state in enumerate(states):
            batch = x[replica] if self.local_norm else np.concatenate(x)
            moments = batch.mean(axis=0), batch.var(axis=0, ddof=int(self.unbiased))
            for statistic, moment in zip(state[2:4], moments, strict=True):
                weight = np.float32(self.norm_momentum)
                statistic[:] = (1 - weight) * statistic + weight * moment.astype(np.float32)

    def _keep(self, step: int, kind: str, per_replica: Sequence[Arrays]) -> None:
        position = list(self.steps).index(step) + 1
        for replica, arrays in enumerate(per_replica):
            if kind == "sums" and self.reduce is None:
                continue
            for index, array in enumerate(arrays):
                self.arrays[f"{position}/{kind}/{replica}/{index}"] = np.array(array)

    def trace(self, name: str = "one.npz") -> Trace:
        """Returns the recording."""
        kernel, bias = WEIGHTS
        variables = [
            Variable(kernel, WEIGHT, "IO"),
            Variable(bias, WEIGHT),
            *(Variable(norm, STATISTIC) for norm in NORM),
            *(
                Variable(f"{weight}/{slot}", STATE, of=weight, slot=slot)
                for weight in WEIGHTS
                for slot in SLOTS[self.optimizer]
            ),
            *self.more_variables,
        ]
        norm = {"name": "norm", "class": "BatchNorm2d", "weights": [], "epsilon": 1e-5}
        if self.replicas > 1 and not self.local_norm:
            norm["class"] = "SyncBatchNorm"
        about = {
            "framework": self.framework, "num_replicas": self.replicas, "steps": tuple(self.steps),
            "variables": tuple(variables), "gradients": WEIGHTS, "reduction": "mean",
            "optimizer": {"class": self.optimizer, "framework": self.framework},
            "settings": self._settings_of(0), "layers": ({**norm, "momentum": self.norm_momentum},),
            "permuted": self.permute, "replayed": "one.npz" if self.replay else None, **self.about,
        }  # fmt: skip
        trace = Trace(About(**about), dict(self.arrays), name)
        trace.of_replica = {
            replica: dataclasses.replace(trace.about, settings=self._settings_of(replica))
            for replica in self.of_replica
        }
        return trace

    def _settings_of(self, replica: int) -> tuple:
        settings = self.settings | self.of_replica.get(replica, {})
        return (({**settings, "weights": list(WEIGHTS)},),) * len(self.steps)

    def write(self, path: pathlib.Path) -> str:
        """Writes the recording; returns its path."""
        save(self.trace(), path)
        return str(path)
