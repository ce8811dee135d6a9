"""Consecutive layers of a network on devices of their own, and where a network can be cut."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from strategies import layer_calls
from strategies.flops import forward_flops
from strategies.layer_calls import LayerCall, LayerCalls
from strategies.shard_step import copies_of


class Stage(NamedTuple):
    """Consecutive layers of a network, with variables of their own on one device.

    Attributes:
        device: its name.
        calls: of the layers, whose own variables are not used.
        weights: in place of the layers' trainable variables.
        statistics: for each micro-batch, variables in place of the other ones.
        optimizer: of the weights.
    """

    device: str
    calls: list[LayerCall]
    weights: list[keras.Variable]
    statistics: list[list[keras.Variable]]
    optimizer: keras.optimizers.Optimizer

    @classmethod
    def create(
        cls,
        calls: list[LayerCall],
        device: str,
        optimizer: keras.optimizers.Optimizer,
        num_micro_batches: int,
    ) -> "Stage":
        """Creates the variables, with the values of the layers' own, on the device."""
        trainable, others = layer_calls.variables_of(calls)
        with tf.device(device):
            weights = copies_of(trainable)
            statistics = [copies_of(others) for _ in range(num_micro_batches)]
            optimizer.build(weights)
        return cls(device, calls, weights, statistics, optimizer)

    @property
    def weight_paths(self) -> list[str]:
        """Paths of the weights in the model."""
        return [variable.path for variable in layer_calls.variables_of(self.calls)[0]]

    @property
    def statistics_paths(self) -> list[str]:
        """Paths of the other variables in the model."""
        return [variable.path for variable in layer_calls.variables_of(self.calls)[1]]

    def forward(
        self,
        x: tf.Tensor,
        weights: Sequence[tf.Tensor],
        statistics: Sequence[tf.Tensor | tf.Variable],
        *,
        training: bool,
    ) -> tf.Tensor:
        """Returns what the layers make of the images, or of the activations of the stage before.

        Args:
            x: `(n, ...)`, on this device.
            weights: to use, tensors.
            statistics: to use; those that are variables are updated in training.
            training: for layers that work differently in training.
        """

        def call_layers() -> tf.Tensor:
            tensors = layer_calls.run(self.calls, {self.calls[0].inputs[0]: x}, training=training)
            return tensors[self.calls[-1].output]

        trainable, others = layer_calls.variables_of(self.calls)
        values = [*zip(trainable, weights, strict=True), *zip(others, statistics, strict=True)]
        return layer_calls.with_values(call_layers, values)


def cut_points(model_calls: LayerCalls) -> list[int]:
    """Returns after which calls exactly one tensor is needed by those that follow.

    There, and only there, a single tensor travels between two stages. Nothing is cut off that has
    no weights to train, such as the scaling of the images.

    Returns:
        Positions in `model_calls.calls`, the last one left out.
    """
    calls = model_calls.calls
    last_use = {i: position for position, call in enumerate(calls) for i in call.inputs}
    first = next((i for i, call in enumerate(calls) if call.layer.trainable_variables), len(calls))
    points = []
    for position in range(first, len(calls) - 1):
        alive = [
            call.output for call in calls[: position + 1] if last_use[call.output] > position
        ]
        if alive == [calls[position].output]:
            points.append(position)
    return points


def cut(
    model_calls: LayerCalls, num_stages: int, after: Sequence[str] = ()
) -> list[list[LayerCall]]:
    """Cuts a network into consecutive stages.

    Args:
        model_calls: of the network.
        num_stages: K.
        after: names of the K - 1 layers after which it is cut; empty to balance the arithmetic:
            the stage with the most of it has the least possible.

    Raises:
        ValueError: there are too few places to cut, or a name is not one of them.
    """
    calls, points = model_calls.calls, cut_points(model_calls)
    names = {calls[point].layer.name: point for point in points}
    if num_stages > len(points) + 1:
        raise ValueError(
            f"{num_stages} stages need {num_stages - 1} cuts, and this network can be cut in"
            f" {len(points)} places, after {', '.join(names)}; use --model_parallel={len(points) + 1}"
            " or less"
        )
    if after and (len(after) != num_stages - 1 or not set(after) <= set(names)):
        raise ValueError(
            f"--pipeline_cuts={','.join(after)} must name {num_stages - 1} of the layers after which"
            f" this network can be cut: {', '.join(names)}"
        )
    if after:
        chosen = tuple(names[name] for name in after)
        if list(chosen) != sorted(set(chosen)):
            raise ValueError(
                f"--pipeline_cuts={','.join(after)} must be in the order of the network:"
                f" {', '.join(names)}"
            )
    else:
        chosen = _balanced(calls, points, num_stages)
    bounds = [0, *(point + 1 for point in chosen), len(calls)]
    return [calls[start:end] for start, end in itertools.pairwise(bounds)]


def stage_flops(stage: Sequence[LayerCall]) -> float:
    """Returns the multiplications and additions of a stage's forward pass, for one example."""
    return sum(forward_flops(call.layer) for call in stage)


def _balanced(
    calls: Sequence[LayerCall], points: Sequence[int], num_stages: int
) -> tuple[int, ...]:
    """Returns the cuts with which the largest stage is smallest, by dynamic programming."""
    ends = [*points, len(calls) - 1]
    sums = list(itertools.accumulate((stage_flops([call]) for call in calls), initial=0.0))
    # For the calls up to each end: the largest of k stages, and the cuts between them.
    best = {end: (sums[end + 1], ()) for end in ends}
    for num_cuts in range(1, num_stages):
        best = {
            end: min(
                (max(best[cut][0], sums[end + 1] - sums[cut + 1]), (*best[cut][1], cut))
                for cut in ends[: ends.index(end)]
                if cut in best
            )
            for end in ends[num_cuts:]
        }
    return best[ends[-1]][1]
