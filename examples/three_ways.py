"""Splits a training step over devices in three ways: by examples, by layers and by channels.

    python examples/three_ways.py --num_gpus=2

Each way is a function that computes the gradients of one small network for one batch:

* `by_examples` (data parallelism) splits the batch. Gradients are sent.
* `by_layers` (pipeline parallelism) splits the network between its layers. Activations at the cut
  are sent, and their gradients.
* `by_channels` (tensor parallelism) splits every layer. All activations are sent, and their
  gradients.

Each trains the network from equal weights, and is compared with the training on one device. Only
the gradients are computed in three ways: for brevity, one copy of the parameters is updated, and
sent again in each step.
"""

import argparse
import functools

import numpy as np
import tensorflow as tf

import data_parallel

BATCH_SIZE, LEARNING_RATE, NUM_STEPS, NUM_MICRO_BATCHES = 96, 0.1, 50, 4
SHAPES = [(784, 60), (60,), (60, 10), (10,)]


def hidden_layer(params, images):
    """Returns the activations of a dense layer for images `(n, 784)`."""
    weight, bias = params
    return tf.nn.relu(tf.matmul(images, weight) + bias)


def output_layer(params, hidden):
    """Returns the logits of a dense layer."""
    weight, bias = params
    return tf.matmul(hidden, weight) + bias


def loss_of(logits, labels, num_examples):
    """Returns (sum of the losses of some examples) / (examples of the whole batch)."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_sum(losses) / num_examples


def one_device(params, batch, devices):
    """Computes the gradients of the whole batch on the first device."""
    images, labels = batch
    with tf.device(devices[0]), tf.GradientTape() as tape:
        tape.watch(params)
        logits = output_layer(params[2:], hidden_layer(params[:2], images))
        loss = loss_of(logits, labels, BATCH_SIZE)
    return tape.gradient(loss, params)


def by_examples(params, batch, devices):
    """Gives each device all parameters and a shard of the batch, and sums the gradients."""
    parts, per_device_gradients = [data_parallel.split_batch(x, devices) for x in batch], []
    for device, images, labels in zip(devices, *parts, strict=True):
        with tf.device(device), tf.GradientTape() as tape:
            copies = [tf.identity(param) for param in params]
            tape.watch(copies)
            logits = output_layer(copies[2:], hidden_layer(copies[:2], images))
            loss = loss_of(logits, labels, BATCH_SIZE)
        with tf.device(device):
            per_device_gradients.append(tape.gradient(loss, copies))
    of_each_parameter = zip(*per_device_gradients, strict=True)
    return [data_parallel.all_reduce(copies, devices)[0] for copies in of_each_parameter]


def by_layers(params, batch, devices):
    """Gives the hidden layer to the first device, the output layer and the loss to the last.

    The batch is split into micro-batches, whose gradients are summed. Here the devices take turns;
    a pipeline lets the first device compute the next micro-batch meanwhile.
    """
    gradients = [tf.zeros_like(param) for param in params]
    micro_batches = [tf.split(tensor, NUM_MICRO_BATCHES) for tensor in batch]
    for images, labels in zip(*micro_batches, strict=True):
        with tf.device(devices[0]), tf.GradientTape() as first_tape:
            first_tape.watch(params[:2])
            sent = hidden_layer(params[:2], images)
        with tf.device(devices[-1]), tf.GradientTape() as last_tape:
            received = tf.identity(sent)  # Sends the activations.
            last_tape.watch([received, *params[2:]])
            loss = loss_of(output_layer(params[2:], received), labels, BATCH_SIZE)
        with tf.device(devices[-1]):
            back, *of_output = last_tape.gradient(loss, [received, *params[2:]])
        with tf.device(devices[0]):  # Sends their gradients back.
            start = tf.identity(back)
            of_hidden = first_tape.gradient(sent, params[:2], output_gradients=start)
        gradients = [a + b for a, b in zip(gradients, [*of_hidden, *of_output], strict=True)]
    return gradients


def by_channels(params, batch, devices):
    """Gives each device some output channels of every layer, and all examples."""
    images, labels = batch
    per_param_parts = [split_channels(param, devices) for param in params]
    per_device_params = list(zip(*per_param_parts, strict=True))
    with tf.GradientTape() as tape:
        tape.watch(per_device_params)
        hidden_parts, logit_parts = [], []
        for device, own in zip(devices, per_device_params, strict=True):
            with tf.device(device):
                hidden_parts.append(hidden_layer(own[:2], images))
        per_device_hidden = gather_channels(hidden_parts, devices)
        for device, own, hidden in zip(devices, per_device_params, per_device_hidden, strict=True):
            with tf.device(device):
                logit_parts.append(output_layer(own[2:], hidden))
        with tf.device(devices[0]):
            loss = loss_of(tf.concat(logit_parts, axis=-1), labels, BATCH_SIZE)
    # One tape runs the backward pass of all devices, each operation on the device of its input.
    per_device_gradients = tape.gradient(loss, per_device_params)
    return [tf.concat(parts, axis=-1) for parts in zip(*per_device_gradients, strict=True)]


def split_channels(tensor, devices):
    """Returns on each device its part of the last axis."""
    parts, channels = [], np.array_split(range(tensor.shape[-1]), len(devices))
    for device, indices in zip(devices, channels, strict=True):
        with tf.device(device):
            parts.append(tf.gather(tensor, indices, axis=-1))
    return parts


def gather_channels(parts, devices):
    """Returns all channels on each device.

    In the backward pass, each device knows only the gradient that comes through its own outputs.
    The gradient of a channel is their sum over the devices. A tape adds them on its own; here the
    sum is written out, because it is communication.
    """

    @tf.custom_gradient
    def gather(*parts):
        def backward(*per_device_gradients):
            return split_channels(functools.reduce(tf.add, per_device_gradients), devices)

        copies = []
        for device in devices:
            with tf.device(device):
                copies.append(tf.concat(parts, axis=-1))
        return copies, backward

    return gather(*parts)


def train(compute_gradients, devices, images, labels):
    """Trains from equal initial values; returns the parameters."""
    random = np.random.default_rng(0)
    params = [tf.constant(random.normal(0, 0.05, shape), tf.float32) for shape in SHAPES]
    for step in range(NUM_STEPS):
        rows = slice(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
        batch = tf.constant(images[rows]), tf.constant(labels[rows])
        gradients = compute_gradients(params, batch, devices)
        params = [p - LEARNING_RATE * g for p, g in zip(params, gradients, strict=True)]
    return params


def main():
    """Trains in each way, and prints the largest difference of a parameter from one device."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--num_gpus", type=int, default=2)
    devices = data_parallel.choose_devices(parser.parse_args().num_gpus)
    (images, labels), _ = data_parallel.load_data()
    images = (images.reshape(-1, 784) / 255).astype(np.float32)
    expected = train(one_device, devices, images, labels.astype(np.int32))
    for way in (by_examples, by_layers, by_channels):
        params = train(way, devices, images, labels.astype(np.int32))
        apart = max(
            np.abs(param.numpy() - right.numpy()).max()
            for param, right in zip(params, expected, strict=True)
        )
        print(f"{way.__name__}, {NUM_STEPS} steps: at most {apart:.1g} apart from one device")


if __name__ == "__main__":
    main()
