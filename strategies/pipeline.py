"""Pipeline parallelism (network partitioning), to be read from top to bottom.

The layers of the network are cut into K consecutive stages, one for each device. A stage hands its
activations to the next device, and gets back the gradient by them. So that the devices work at the
same time, the global batch is split into M micro-batches: while stage 1 works on the first one,
stage 0 works on the second. A schedule, see `schedules.py`, says in which order. One training step
1. splits the batch, 2. works through the schedule, where each backward pass is the chain rule
through one stage, and 3. adds the gradients of the micro-batches, in order, and updates each
stage's weights on its own device. All micro-batches of a step see the same weights.

With `--model_parallel=K` on R·K devices there are R such pipelines, each with its own part of the
batch; before the update the gradients of each stage are summed over them (an all-reduce).

Left out on purpose: interleaved stages, several on each device, shorten idle time by more messages
(D. Narayanan et al., 2021). Zero-bubble schedules split the backward pass into that by inputs and
that by weights, so that the latter fills the gaps (P. Qi et al., 2023). PipeDream (2019) never waits
for the last micro-batch, and trains with weights that are one or more updates old.

Reference: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", 2019.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from strategies import base, collectives, layer_calls
from strategies.copies import Variables, optimizer_names
from strategies.layer_calls import LayerCall, LayerCalls, with_values
from strategies.manual import all_reduce
from strategies.observer import Shard
from strategies.schedules import SCHEDULES, in_order
from strategies.shard_step import copies_of
from strategies.split_variable import RepeatedVariable
from strategies.stages import cut, layer_variables
from strategies.tf_private import free_values


class Stage(NamedTuple):
    """Consecutive layers of the network, on one device.

    Attributes:
        device: its name.
        calls: of the layers.
        weights: trainable variables of the layers, in the order of the network.
        statistics: for each micro-batch, the other variables.
        optimizer: of the weights.
    """

    device: str
    calls: list[LayerCall]
    weights: list[keras.Variable]
    statistics: list[list[keras.Variable]]
    optimizer: keras.optimizers.Optimizer

    def forward(
        self, weights: Sequence[tf.Tensor], x: tf.Tensor, m: int, *, assigns: bool = True
    ) -> tf.Tensor:
        """Returns what the stage makes of its input, in training, with these weights.

        `assigns` says whether the moving statistics of micro-batch m are updated.
        """
        variables = layer_variables(self.calls)
        values = [
            *zip((v for v in variables if v.trainable), weights, strict=True),
            *zip(
                (v for v in variables if not v.trainable),
                (v.value for v in self.statistics[m]),
                strict=True,
            ),
        ]
        return with_values(lambda: self._call(x, training=True), values, assigns=assigns)
