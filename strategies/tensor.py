"""Implements tensor parallelism (layerwise partitioning). Read this file from top to bottom.

Every convolution and dense layer is split: each of T devices computes some of its output channels
and stores the weights for them. All devices receive the same images. One training step

1. runs the forward pass, layer by layer, on all devices in parallel; if a layer needs all channels
   of its input, each device copies the channels of the others (all-gather),
2. computes the loss from the gathered logits on the first device,
3. runs the backward pass: every device that used a channel contributes to its gradient, so that the
   backward pass of a gather sums over the devices and each device keeps its own channels
   (reduce-scatter), and
4. updates the weights of each device.

The result equals a training step on one device. BatchNorm computes the mean of each channel over
the *whole* batch without communication. Without the sum of part 3, the loss of the first step is
still correct and the network still learns; only the gradients are wrong.

With `--model_parallel=T` on R·T devices there are R replicas, each with its own part of the batch;
before the update, the gradients of each device are summed over the replicas (an all-reduce).
`channel_parts.py` splits the layers; `device_tape.py` has the gather and its backward pass.

Not implemented: splits by input channels, which sum outputs instead of gathering inputs
(Megatron-LM, M. Shoeybi et al., 2019); they are efficient for pairs of adjacent layers.
TensorFlow's DTensor does not split convolutions.

Reference: A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
"""

import functools
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from strategies.base import BatchIterator, OptimizerFn
from strategies.channel_parts import Row
from strategies.copies import Variables
from strategies.device_tape import DeviceTape, Spread
from strategies.evaluation import Statistics
from strategies.layer_calls import LayerCalls
from strategies.loss import unscaled
from strategies.model_parallel import Classify, ModelParallelStrategy
from strategies.observer import Shard
from strategies.step_totals import StepTotals

Weights = Sequence[Mapping[str, tf.Tensor]]  # For each device, path of a variable → its part.


class TensorStrategy(ModelParallelStrategy):
    """Trains a model whose layers are split by output channels over the devices."""

    name = "tensor"

    def build_parts(
        self, model_calls: LayerCalls, optimizer_fn: OptimizerFn
    ) -> keras.optimizers.Optimizer:
        self._calls = model_calls
        self._paths = [variable.path for variable in self.model.trainable_variables]
        self.rows = [
            Row.create(devices, model_calls, optimizer_fn) for devices in self.replica_devices
        ]
        return self.rows[0].optimizers[0]

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        images, labels = next(iterator)
        per_replica_gradients, per_replica_totals = [], []
        for r, (own_images, own_labels) in enumerate(self.scatter((images, labels))):
            shard = Shard(own_images, own_labels, tf.size(labels))
            gradients, totals = self._row_gradients(r, shard)  # 1 to 3.
            per_replica_gradients.append(gradients)
            per_replica_totals.append(totals)
        per_replica_sums = self.sum_over_replicas(per_replica_gradients)
        for r, (row, sums) in enumerate(zip(self.rows, per_replica_sums, strict=True)):
            row.update(sums)  # 4. Each device its own weights.
            self.observer.on_update(r, row.join(sums, self._paths))
        return StepTotals.sum(per_replica_totals)

    def _row_gradients(self, r: int, shard: Shard) -> tuple[list[list[tf.Tensor]], StepTotals]:
        """Computes the gradients of a replica's shard; item [d] belongs to its device d."""
        row, weights = self.rows[r], self.read_weights(r)
        tape = self.new_tape(row.devices)
        logits = self._logits(tape, row, shard.images, weights, training=True)  # 1. Forward.
        with tf.device(row.devices[0]):  # 2. The loss.
            loss, totals, gradient = self.loss_and_logits_gradient(
                logits.tensors[0], shard.labels, shard.num_global_examples
            )
        others = [None] * (len(row.devices) - 1)
        per_device_weights = [list(named.values()) for named in weights]
        gradients = tape.gradient(logits, [gradient, *others], per_device_weights)  # 3. Backward.
        for d, device in enumerate(row.devices):
            with tf.device(device):
                gradients[d] = unscaled(gradients[d], self.loss_scale)
        whole = row.join(gradients, self._paths)
        with tf.device(row.devices[0]):
            observed = shard._replace(logits=logits.tensors[0])
            seen = self.observer.on_shard(r, observed, loss, whole)
        if seen is not whole:
            gradients = row.split(seen, self._paths)
        return gradients, totals

    def _logits(
        self, tape: DeviceTape, row: Row, images: tf.Tensor, weights: Weights, *, training: bool
    ) -> Spread:
        """Calls all layers on all devices of a replica; returns the logits on its first device."""
        values = {self._calls.input: tape.copies_of(images)}
        sizes: dict[int, list[int] | None] = {self._calls.input: None}
        gathered: dict[int, Spread] = {}
        for split in row.calls:
            inputs = []
            for i in split.call.inputs:
                own_sizes = sizes[i]
                if split.gathers and own_sizes and i not in gathered:
                    gathered[i] = tape.gather(values[i], own_sizes)
                inputs.append(gathered.get(i, values[i]) if split.gathers else values[i])
            values[split.call.output] = split.on_each_device(
                tape, inputs, weights, training=training
            )
            sizes[split.call.output] = split.sizes
        output, own_sizes = values[self._calls.output], sizes[self._calls.output]
        return tape.gather(output, own_sizes, first_alone=True) if own_sizes else output

    def new_tape(self, devices: Sequence[str]) -> DeviceTape:
        """Returns the tape of one pass over the layers of a replica."""
        return DeviceTape(devices)

    def gather_tapes(self) -> list[DeviceTape]:
        return [self.new_tape(devices) for devices in self.replica_devices]

    def read_weights(self, r: int) -> list[dict[str, tf.Tensor]]:
        """Reads the weights of each device of a replica."""
        return self.rows[r].read_weights()

    def classifiers(self, statistics: Statistics) -> list[Classify]:
        return [functools.partial(self._classify, r, statistics) for r in range(self.num_replicas)]

    def _classify(self, r: int, statistics: Statistics, images: tf.Tensor) -> tf.Tensor:
        row, own = self.rows[r], self.rows[r].parts_of(statistics)
        values = [named | parts for named, parts in zip(self.read_weights(r), own, strict=True)]
        tape = self.new_tape(row.devices)
        return self._logits(tape, row, images, values, training=False).tensors[0]

    @property
    def part_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        return [shapes for row in self.rows for shapes in row.weight_shapes()]

    def copies(self) -> list[Variables]:
        return [row.whole_variables(self.variable_names) for row in self.rows]
