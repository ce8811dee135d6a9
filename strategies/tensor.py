"""Tensor parallelism (layerwise partitioning), to be read from top to bottom.

Every layer is split: each of T devices has some of the output channels of every convolution and
dense layer, and the weights that they need. All devices take the same images. One training step
goes 1. forward, layer by layer, on all devices side by side; where a layer needs all channels of
its input, each device copies those of the others (all-gather). 2. The loss is computed from the
gathered logits on the first device. 3. The way back: to each channel the gradient comes from every
device that has used it, so that the backward pass of a gather is a sum over the devices, of which
each takes its own channels (reduce-scatter). 4. Each device updates its own weights.

What the devices compute is one training step of one device: BatchNorm takes its channels' mean over
the *whole* batch, without any exchange. Left out, that sum leaves the loss of the first step right
and lets the network learn; only its gradients are wrong.

With `--model_parallel=T` on R·T devices there are R replicas, each with its own part of the batch;
before the update the gradients of each device are summed over them (an all-reduce).

Left out on purpose: splits by input channels, which gather nothing and sum outputs instead
(Megatron-LM, M. Shoeybi et al., 2019); they pay in pairs of layers without anything in between.
TensorFlow's own DTensor does not split convolutions.

Reference: A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
"""

import functools
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from strategies import base
from strategies.channel_parts import Row
from strategies.copies import Variables
from strategies.device_tape import DeviceTape, Spread
from strategies.layer_calls import LayerCalls
from strategies.manual import all_reduce, split_batch
from strategies.model_parallel import Classify, ModelParallelStrategy
from strategies.observer import Shard


class TensorStrategy(ModelParallelStrategy):
    """The channels of every layer split over the devices."""

    name = "tensor"

    @property
    def gather_groups(self) -> list[list[str]]:
        return self.replica_devices

    def build_parts(
        self, model_calls: LayerCalls, optimizer_fn: base.OptimizerFn
    ) -> keras.optimizers.Optimizer:
        self._calls = model_calls
        self._paths = [variable.path for variable in self.model.trainable_variables]
        self.rows = [
            Row.create(devices, model_calls, optimizer_fn) for devices in self.replica_devices
        ]
        return self.rows[0].optimizers[0]

    def train_step(self, iterator: base.BatchIterator) -> base.StepTotals:
        images, labels = next(iterator)
        firsts = self.local_replica_devices
        shards = split_batch((images, labels), firsts, self.replica_weights)
        per_replica_gradients, per_replica_totals = [], []
        for r, shard in enumerate(shards):
            gradients, totals = self._gradients_of_row(
                r, Shard(shard[0], shard[1], tf.size(labels))
            )
            per_replica_gradients.append(gradients)  # Item [r][d] is of device d.
            per_replica_totals.append(totals)
        per_device_sums = [
            all_reduce(list(of_device), [row.devices[d] for row in self.rows])
            for d, of_device in enumerate(zip(*per_replica_gradients, strict=True))
        ]
        for r, row in enumerate(self.rows):
            sums = [of_device[r] for of_device in per_device_sums]
            for d, device in enumerate(row.devices):
                with tf.device(device):  # 4. Each device updates its own weights.
                    weights = list(row.variables(d, trainable=True).values())
                    row.optimizers[d].apply(sums[d], weights)
            self.observer.on_update(r, row.join(sums, self._paths))
        return base.StepTotals.sum(per_replica_totals)

    def _gradients_of_row(
        self, r: int, shard: Shard
    ) -> tuple[list[list[tf.Tensor]], base.StepTotals]:
        """Computes the gradients of a replica's shard; item [d] is of its device d."""
        row, tape = self.rows[r], DeviceTape(self.rows[r].devices, self.observer)
        weights = row.read_weights(self.observer, r * self.devices_per_replica)
        logits = self._logits(tape, row, shard.images, weights, training=True)  # 1. Forward.
        with tf.device(row.devices[0]):  # 2. The loss.
            loss, totals, gradient = self.loss_and_logits_gradient(
                logits.tensors[0], shard.labels, shard.num_global_examples
            )
        others = [None] * (len(row.devices) - 1)
        per_device_weights = [list(named.values()) for named in weights]
        gradients = tape.gradient(logits, [gradient, *others], per_device_weights)  # 3. Back.
        for d, device in enumerate(row.devices):
            with tf.device(device):
                gradients[d] = self.unscale(gradients[d])
        whole = row.join(gradients, self._paths)
        with tf.device(row.devices[0]):
            seen = self.observer.on_shard(r, shard, loss, whole)
        return (gradients if seen is whole else row.split(seen, self._paths)), totals

    def _logits(
        self,
        tape: DeviceTape,
        row: Row,
        images: tf.Tensor,
        weights: Sequence[Mapping[str, tf.Tensor]],
        *,
        training: bool,
    ) -> Spread:
        """Calls all layers on all devices of a replica; returns the logits, on the first device.

        Args:
            tape: records the calls.
            row: the devices and layers.
            images: uint8 `(n, height, width, channels)`.
            weights: for each device, path of a variable → its part.
            training: for layers that work differently in training.
        """
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

    def classifiers(self, statistics: base.Statistics) -> list[Classify]:
        return [functools.partial(self._classify, r, statistics) for r in range(self.num_replicas)]

    def _classify(self, r: int, statistics: base.Statistics, images: tf.Tensor) -> tf.Tensor:
        row = self.rows[r]
        weights = row.read_weights(self.observer, r * self.devices_per_replica)
        own = row.parts_of(statistics)
        values = [named | parts for named, parts in zip(weights, own, strict=True)]
        tape = DeviceTape(row.devices, self.observer)
        return self._logits(tape, row, images, values, training=False).tensors[0]

    def copies(self) -> list[Variables]:
        return [row.whole_variables(self.variable_names) for row in self.rows]
