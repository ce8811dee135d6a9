"""Trains LeNet with an all-reduce that is wrong, and with the right one, on four devices.

    python examples/wrong_all_reduce.py

An edition of "Dive into Deep Learning" had the wrong one (d2l-ai/d2l-zh, pull request 955). Its
demonstration prints the list that it is given, where it is right. Here, as in PyTorch, each device
holds its gradients in variables, from which it is updated. `docs/wrong_all_reduce.md` has the
results. All else is that of `data_parallel.py`, which has to be in the same folder.
"""

import argparse

import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import data_parallel
from data_parallel import lenet, local_gradients, sgd, split_batch


def wrong(data):
    """Sums into the first variable, then replaces the list's other items by copies."""
    for i in range(1, len(data)):
        data[0].assign_add(data[i])
    for i in range(1, len(data)):
        with tf.device(data[i].device):
            data[i] = tf.identity(data[0])


def right(data):
    """Sums into the first variable, then writes the sum into the others."""
    for i in range(1, len(data)):
        data[0].assign_add(data[i])
    for i in range(1, len(data)):
        data[i].assign(data[0])


def create(all_reduce, devices):
    """Returns the parameters on each device, and a step with variables for the gradients."""
    device_params, device_gradients = [], []
    for device in devices:
        with tf.device(device):
            params = [tf.Variable(v, dtype="float32") for v in data_parallel.initial_values()]
            device_params.append(params)
            device_gradients.append([tf.Variable(tf.zeros_like(param)) for param in params])

    @tf.function
    def train_batch(images, labels):
        shards = zip(split_batch(images, devices), split_batch(labels, devices))
        copies = list(zip(devices, device_params, device_gradients))
        for (device, params, gradients), shard in zip(copies, shards):
            with tf.device(device):
                local = local_gradients(params, *shard, len(labels))
                for gradient, value in zip(gradients, local):
                    gradient.assign(value)
        for per_device in zip(*device_gradients):
            all_reduce(list(per_device))  # The list is gone after this line.
        for device, params, gradients in copies:
            with tf.device(device):
                sgd(params, gradients)

    return device_params, train_batch


def accuracy(params, images, labels):
    """Returns the test accuracy with the parameters of a device."""
    logits = np.concatenate([lenet(params, part) for part in np.split(images, 10)])
    return np.mean(np.argmax(logits, axis=1) == labels)


def main():
    """Trains with both, plots the accuracy and prints that of each device at the end."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--num_gpus", type=int, default=4)
    parser.add_argument("--num_epochs", type=int, default=10)
    flags = parser.parse_args()
    devices = data_parallel.choose_devices(flags.num_gpus)
    train_set, test_set = data_parallel.load_data()
    for all_reduce, style in [(right, "-o"), (wrong, "--s")]:
        dataset = tf.data.Dataset.from_tensor_slices(train_set)
        dataset = dataset.shuffle(len(dataset), seed=data_parallel.SEED)
        (device_params, train_batch), accuracies = create(all_reduce, devices), []
        for _ in range(flags.num_epochs):
            for images, labels in dataset.batch(data_parallel.BATCH_SIZE):
                train_batch(images, labels)
            accuracies.append(accuracy(device_params[0], *test_set))
        plt.plot(range(1, flags.num_epochs + 1), accuracies, style, label=all_reduce.__name__)
        of_each = [f"{accuracy(params, *test_set):.4f}" for params in device_params]
        print(f"{all_reduce.__name__}: test accuracy, weights of each device: {', '.join(of_each)}")
    plt.gca().set(xlabel="epoch", ylabel="test accuracy, weights of the first device", ylim=(0, 1))
    plt.legend(title=f"all-reduce, {flags.num_gpus} devices")
    plt.savefig("wrong_all_reduce.png")


if __name__ == "__main__":
    main()
