"""Finds the points where a network can be cut into stages, and balances the stages."""

import itertools
import math
from collections.abc import Iterator, Sequence

import keras
import numpy as np

from strategies.layer_calls import LayerCall, LayerCalls


def cut_points(model_calls: LayerCalls) -> list[int]:
    """Returns the calls after which the following calls need exactly one tensor.

    Only there does a single tensor cross between two stages. A stage without trainable weights,
    such as the scaling of the images, is never cut off.

    Returns:
        Positions in `model_calls.calls`, without the last call.
    """
    calls = model_calls.calls
    last_use = {i: position for position, call in enumerate(calls) for i in call.inputs}
    first = next((i for i, call in enumerate(calls) if call.layer.trainable_variables), len(calls))
    points = []
    for position in range(first, len(calls) - 1):
        alive = [call.output for call in calls[: position + 1] if last_use[call.output] > position]
        if alive == [calls[position].output]:
            points.append(position)
    return points


def cut(
    model_calls: LayerCalls, num_stages: int, after: Sequence[str] = ()
) -> list[list[LayerCall]]:
    """Cuts a network into consecutive stages.

    Args:
        model_calls: layer calls of the network.
        num_stages: K.
        after: names of the K - 1 layers after which to cut; empty to minimise the arithmetic of
            the largest stage.

    Raises:
        ValueError: there are too few cut points, or a name is not one of them.
    """
    calls, points = model_calls.calls, cut_points(model_calls)
    names = {calls[point].layer.name: point for point in points}
    if num_stages > len(points) + 1:
        raise ValueError(
            f"{num_stages} stages need {num_stages - 1} cuts, and the network can be cut in"
            f" {len(points)} places, after {', '.join(names)}; use"
            f" --model_parallel={len(points) + 1} or less"
        )
    if after and (len(after) != num_stages - 1 or not set(after) <= set(names)):
        raise ValueError(
            f"--pipeline_cuts={','.join(after)} must name {num_stages - 1} of the layers after"
            f" which the network can be cut: {', '.join(names)}"
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
    """Returns the cuts that minimise the largest stage, by dynamic programming.

    Ties are broken by the smallest sum of squares (evenly sized stages), then by the fewest numbers
    sent between stages.
    """
    ends = [*points, len(calls) - 1]
    sums = list(itertools.accumulate((stage_flops([call]) for call in calls), initial=0.0))

    def flops(start: int, end: int) -> float:
        return sums[end + 1] - sums[start]

    # Last call so far → the best cuts up to this call: (arithmetic of the largest stage, sum of
    # squares, numbers sent between stages, cuts).
    best: dict[int, tuple[float, float, int, tuple[int, ...]]] = {
        end: (flops(0, end), flops(0, end) ** 2, 0, ()) for end in ends
    }
    for num_cuts in range(1, num_stages):
        longer = {}
        for position in range(num_cuts, len(ends)):
            end, found = ends[position], []
            for cut in ends[num_cuts - 1 : position]:
                largest, squares, travels, cuts = best[cut]
                own, size = flops(cut + 1, end), math.prod(calls[cut].layer.output.shape[1:])
                found.append((max(largest, own), squares + own**2, travels + size, (*cuts, cut)))
            longer[end] = min(found)
        best = longer
    return best[ends[-1]][3]


def product_layers(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Yields the convolution and dense layers in order, including those of nested models."""
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from product_layers(layer)
        elif isinstance(layer, keras.layers.Conv2D | keras.layers.Dense):
            yield layer


def forward_flops(layer: keras.layers.Layer) -> float:
    """Returns the multiplications and additions of a layer's forward pass per example.

    Counts only convolutions and matrix products, as is usual; other layers are 0.
    """
    if not isinstance(layer, keras.layers.Conv2D | keras.layers.Dense):
        return 0.0
    positions = np.prod(layer.output.shape[1:-1])  # The empty product of a dense layer is 1.
    return float(2 * positions * np.prod(layer.kernel.shape))
