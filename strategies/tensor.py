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

import tensorflow as tf

from strategies.base import BatchIterator, OptimizerFn
from strategies.channel_parts import channels_of, split_calls
from strategies.collectives import PerReplicaTensors
from strategies.device_tape import DeviceTape, PerDeviceTensors
from strategies.evaluation import Statistics
from strategies.layer_calls import LayerCalls
from strategies.loss import unscaled
from strategies.model_parallel import ModelParallelStrategy
from strategies.observer import Shard
from strategies.parts import DevicePart
from strategies.step_totals import StepTotals

# For each device, path of a variable → its part.
Values = Sequence[Mapping[str, tf.Tensor | tf.Variable]]


class TensorStrategy(ModelParallelStrategy):
    """Trains a model whose layers are split by output channels over the devices."""

    name = "tensor"
    split_axis = -1

    def split_layers(self, model_calls: LayerCalls) -> None:
        self._calls = model_calls
        self._split_calls = [split_calls(model_calls, devices) for devices in self.replica_devices]

    def build_parts(self, devices: Sequence[str], optimizer_fn: OptimizerFn) -> list[DevicePart]:
        trainable, others = self.model.trainable_variables, self.model.non_trainable_variables
        parts = []
        for d, device in enumerate(devices):
            take = functools.partial(channels_of, device_id=d, num_devices=len(devices))
            parts.append(DevicePart.create(device, optimizer_fn, trainable, others, take=take))
        return parts

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        images, labels = next(iterator)
        per_replica_gradients, per_replica_totals = [], []
        for r, (own_images, own_labels) in enumerate(self.scatter((images, labels))):
            shard = Shard(own_images, own_labels, tf.size(labels))
            gradients, totals = self._replica_gradients(r, shard)  # 1 to 3.
            per_replica_gradients.append(gradients)
            per_replica_totals.append(totals)
        self.update(per_replica_gradients)  # 4. Each device its own weights.
        return StepTotals.sum(per_replica_totals)

    def _replica_gradients(self, r: int, shard: Shard) -> tuple[PerReplicaTensors, StepTotals]:
        """Computes the gradients of a replica's shard; item [d] belongs to its device d."""
        devices, weights = self.replica_devices[r], self.read_weights(r)
        values = []
        for own_weights, part in zip(weights, self.parts[r], strict=True):
            values.append(own_weights | {p: v.value for p, v in part.statistics[0].items()})
        tape = self.new_tape(devices)
        outputs = self._logits(tape, r, shard.images, values, training=True)  # 1. Forward.
        logits = outputs[0]
        with tf.device(devices[0]):  # 2. The loss.
            loss, totals, gradient = self.loss_and_logits_gradient(
                logits, shard.labels, shard.num_global_examples
            )
        start: PerDeviceTensors = [gradient, *[None] * (len(devices) - 1)]
        per_device_weights = [list(own.values()) for own in weights]
        gradients = tape.gradient(outputs, start, per_device_weights)  # 3. Backward.
        for d, device in enumerate(devices):
            with tf.device(device):
                gradients[d] = unscaled(gradients[d], self.loss_scale)
        whole = self.join(r, gradients)
        with tf.device(devices[0]):
            seen = self.observer.on_shard(r, shard._replace(logits=logits), loss, whole)
        if seen is not whole:
            gradients = self.split(r, seen)
        return gradients, totals

    def _logits(
        self, tape: DeviceTape, r: int, images: tf.Tensor, values: Values, *, training: bool
    ) -> PerDeviceTensors:
        """Calls all layers on all devices of a replica; returns the logits."""
        outputs = {self._calls.input: tape.copies_of(images)}
        sizes: dict[int, list[int] | None] = {self._calls.input: None}
        gathered: dict[int, PerDeviceTensors] = {}
        for split in self._split_calls[r]:
            inputs = []
            for i in split.call.inputs:
                own_sizes = sizes[i]
                if split.gathers and own_sizes and i not in gathered:
                    gathered[i] = tape.gather(outputs[i], own_sizes)
                inputs.append(gathered.get(i, outputs[i]) if split.gathers else outputs[i])
            outputs[split.call.output] = split.on_each_device(
                tape, inputs, values, training=training
            )
            sizes[split.call.output] = split.sizes
        logits, own_sizes = outputs[self._calls.output], sizes[self._calls.output]
        return tape.gather(logits, own_sizes) if own_sizes else logits

    def new_tape(self, devices: Sequence[str]) -> DeviceTape:
        """Returns the tape of one pass over the layers of a replica."""
        return DeviceTape(devices)

    def gather_tapes(self) -> list[DeviceTape]:
        return [self.new_tape(devices) for devices in self.replica_devices]

    def join(self, r: int, per_part_tensors: PerReplicaTensors) -> list[tf.Tensor]:
        with tf.device(self.replica_devices[r][0]):
            return [tf.concat(parts, axis=-1) for parts in zip(*per_part_tensors, strict=True)]

    def split(self, r: int, wholes: Sequence[tf.Tensor]) -> PerReplicaTensors:
        return [part.take_all(wholes) for part in self.parts[r]]

    def logits(self, r: int, statistics: Statistics, images: tf.Tensor) -> tf.Tensor:
        values = []
        for weights, part in zip(self.read_weights(r), self.parts[r], strict=True):
            own = part.take_all(statistics.values())
            values.append(weights | dict(zip(statistics, own, strict=True)))
        tape = self.new_tape(self.replica_devices[r])
        return self._logits(tape, r, images, values, training=False)[0]
