"""What each device of a split training would hold, send and wait for, by arithmetic."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import keras

from app.config import TrainConfig
from app.config.split_numbers import num_replicas
from app.performance.pipeline_timeline import bubble, theoretical_in_flight
from app.performance.traffic_formula import (
    Term,
    activation_bytes,
    pipeline_terms,
    sharded_terms,
    tensor_terms,
)
from app.runtime.errors import ConfigError
from app.training.memory_estimate import MemoryEstimate, with_work
from app.training.tensor_lifetimes import LiveTensors, live_tensors_in_stage
from strategies.channel_parts import SplitCall, split_calls
from strategies.collectives import shard_sizes
from strategies.cuts import cut
from strategies.layer_calls import LayerCall, LayerCalls, variables_of


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes on a device, by estimate.

    Attributes:
        weights: and BatchNorm statistics, those that the device keeps.
        optimizer: its part of the optimizer state.
        gradients: gradients, gathered weights, and what kernels work with, in a step.
        activations: in a step.
    """

    weights: float
    optimizer: float
    gradients: float
    activations: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.optimizer + self.gradients + self.activations


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """A split training that has not been made.

    Attributes:
        devices: of one replica; all of them for sharded.
        num_replicas: R.
        num_like_these: how many replicas have such devices; 1 for sharded.
        terms: what travels in a step.
        stages: first and last layer of each stage of a pipeline.
        bubble: idle share of a pipeline whose stages take equally long; None for others.
        in_flight: micro-batches that each stage remembers.
    """

    devices: list[DeviceMemory]
    num_replicas: int
    num_like_these: int
    terms: list[Term]
    stages: Sequence[tuple[str, str]] = ()
    bubble: float | None = None
    in_flight: Sequence[int] = ()

    @property
    def total_bytes(self) -> float:
        """Memory of all devices together."""
        return self.num_like_these * sum(device.total for device in self.devices)

    @property
    def size_bytes(self) -> int:
        """What travels in a step."""
        return sum(term.size_bytes for term in self.terms)

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        num_devices: int,
        num_examples: int,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
    ) -> "SplitPlan":
        """Plans a training with sharded, pipeline or tensor.

        Args:
            config: of the training.
            num_devices: of all replicas.
            num_examples: of the global batch.
            model: with its initial values.
            optimizer: of the whole model, built.

        Raises:
            ConfigError: the model cannot be split like this.
        """
        replicas = num_replicas(config.strategy, config, num_devices)
        rows = shard_sizes(num_examples, replicas)
        state = _OptimizerState(model, optimizer)
        try:
            if config.strategy == "sharded":
                return _sharded(config, rows, model, state)
            calls, num_parts = LayerCalls.of(model), num_devices // replicas
            if config.strategy == "pipeline":
                stages = cut(calls, num_parts, config.pipeline_cuts)
                return _pipeline(config, rows, stages, state)
            split = split_calls(calls, ["/device:CPU:0"] * num_parts)
            return _tensor(rows, split, model, state)
        except ValueError as error:
            raise ConfigError(str(error)) from error


class _OptimizerState:
    """How large the optimizer state of some weights is."""

    def __init__(self, model: keras.Model, optimizer: keras.optimizers.Optimizer):
        shapes = [variable.shape for variable in optimizer.variables]
        of_weights = sum(math.prod(shape) for shape in shapes if shape)
        self._slots = of_weights // sum(_elements(model.trainable_variables))
        self._numbers_bytes = 8 * sum(not shape for shape in shapes)

    def size_bytes(self, num_elements: int) -> int:
        return 4 * self._slots * num_elements + self._numbers_bytes


def _elements(variables: Sequence[keras.Variable]) -> list[int]:
    return [math.prod(variable.shape) for variable in variables]


def _sharded(
    config: TrainConfig, rows: Sequence[int], model: keras.Model, state: _OptimizerState
) -> SplitPlan:
    """Plans ZeRO: each device keeps a part, and in a step has all weights and gradients."""
    sizes, num = _elements(model.trainable_variables), len(rows)
    estimate = MemoryEstimate.of(model)
    others = 4 * sum(_elements(model.non_trainable_variables))
    alive = max(-(-own // config.accumulate_steps) for own in rows)
    devices = []
    for r in range(num):
        part = sum(shard_sizes(size, num)[r] for size in sizes)
        whole = 4 * sum(sizes)
        keeps_all = config.shard != "weights"  # Beside its part, which is updated.
        devices.append(
            DeviceMemory(
                4 * part + others + keeps_all * whole,
                state.size_bytes(part),
                estimate.step_bytes + (not keeps_all) * whole,
                alive * estimate.image_bytes,
            )
        )
    return SplitPlan(devices, num, 1, sharded_terms(sizes, num, config.shard))


def _pipeline(
    config: TrainConfig,
    rows: Sequence[int],
    stages: Sequence[Sequence[LayerCall]],
    state: _OptimizerState,
) -> SplitPlan:
    """Plans a pipeline: each stage remembers some micro-batches, or their inputs alone."""
    numbers = len(stages), config.micro_batches
    in_flight = theoretical_in_flight(config.schedule, *numbers)
    micro_batch = -(-max(rows) // config.micro_batches)
    devices, input_bytes = [], 0
    for calls, remembered in zip(stages, in_flight, strict=True):
        trainable, others = variables_of(calls)
        size = sum(_elements(trainable))
        fixed, image_bytes = with_work(live_tensors_in_stage(calls))
        alive = remembered * image_bytes
        if config.recompute and calls is not stages[-1]:
            alive = image_bytes + remembered * input_bytes
        kept = 4 * (size + config.micro_batches * sum(_elements(others)))
        devices.append(DeviceMemory(kept, state.size_bytes(size), fixed, micro_batch * alive))
        input_bytes = activation_bytes(calls[-1])
    return SplitPlan(
        devices,
        len(rows),
        len(rows),
        pipeline_terms(stages, rows),
        [(calls[0].layer.name, calls[-1].layer.name) for calls in stages],
        bubble(*numbers),
        in_flight,
    )


def _tensor(
    rows: Sequence[int], calls: Sequence[SplitCall], model: keras.Model, state: _OptimizerState
) -> SplitPlan:
    """Plans a tensor split: parts of all activations, and whole those that are gathered."""
    num_parts, estimate = len(calls[0].layers), MemoryEstimate.of(model)
    producers = {split.call.output: split for split in calls}
    gathered = {
        i for split in calls if split.gathers for i in split.call.inputs
        if i in producers and producers[i].sizes
    }  # fmt: skip
    whole_bytes = sum(activation_bytes(producers[i].call) for i in gathered)
    work_bytes, _ = with_work(LiveTensors(0, 0.0))
    gradients_bytes = estimate.step_bytes - work_bytes
    devices = []
    for d in range(num_parts):
        trainable = [_elements(split.layers[d].trainable_variables) for split in calls]
        others = [_elements(split.layers[d].non_trainable_variables) for split in calls]
        size = sum(itertools.chain(*trainable))
        image_bytes = estimate.image_bytes / num_parts + whole_bytes
        devices.append(
            DeviceMemory(
                4 * (size + sum(itertools.chain(*others))),
                state.size_bytes(size),
                work_bytes + gradients_bytes * size / sum(_elements(model.trainable_variables)),
                max(rows) * image_bytes,
            )
        )
    return SplitPlan(devices, len(rows), len(rows), tensor_terms(calls, rows))
