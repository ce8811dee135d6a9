"""Estimates memory, traffic and idle time of the devices of a split training."""

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
    """Estimated bytes on a device.

    Attributes:
        weights: weights and BatchNorm statistics that the device keeps.
        optimizer: its part of the optimizer state.
        gradients: gradients, gathered weights and workspace of kernels in a step.
        activations: activations in a step.
    """

    weights: float
    optimizer: float
    gradients: float
    activations: float

    @property
    def total(self) -> float:
        """The total."""
        return self.weights + self.optimizer + self.gradients + self.activations


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """The plan of a split training.

    Attributes:
        devices: devices of one replica; for sharded, all devices.
        num_replicas: R.
        num_like_these: number of replicas with such devices; 1 for sharded.
        terms: traffic of a step.
        stages: first and last layer of each stage of a pipeline.
        bubble: idle fraction of a pipeline whose stages take equally long; None for other
            strategies.
        in_flight: number of micro-batches that each stage stores.
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
        """Memory of all devices."""
        return self.num_like_these * sum(device.total for device in self.devices)

    @property
    def size_bytes(self) -> int:
        """Bytes sent in a step."""
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
            config: options of the training.
            num_devices: devices of all replicas.
            num_examples: examples of the global batch.
            model: the model with its initial values.
            optimizer: the built optimizer of the unsplit model.

        Raises:
            ConfigError: the model cannot be split this way.
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
    """Computes the size of the optimizer state of some weights."""

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
    """Plans ZeRO: each device keeps a part; in a step it has all weights and gradients."""
    sizes, num = _elements(model.trainable_variables), len(rows)
    estimate = MemoryEstimate.of(model)
    others = 4 * sum(_elements(model.non_trainable_variables))
    alive = max(-(-own // config.accumulate_steps) for own in rows)
    devices = []
    for r in range(num):
        part = sum(shard_sizes(size, num)[r] for size in sizes)
        whole = 4 * sum(sizes)
        keeps_all = config.shard != "weights"  # In addition to the part that the optimizer updates.
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
    """Plans a pipeline: each stage stores some micro-batches, or only their inputs."""
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
    """Plans a tensor split: parts of all activations, and gathered ones in full."""
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
