"""Divides batches unevenly between a fast and a slow device, and times the steps.

    python examples/unequal_devices.py --slower=3

The training is that of `data_parallel.py`. Device 1 computes everything `--slower` times, which
stands for a slower device. An operation has one thread, so that the devices compute at the same
time on two cores. The shards are equal (128 and 128 of 256 images) or not (192 and 64).
"""

import argparse
import time

import numpy as np
import tensorflow as tf

import data_parallel

NUM_ROUNDS, NUM_STEPS = 7, 10
SHARDS = {"equal": [128, 128], "weighted": [192, 64]}


def create(sizes, devices, slower):
    """Returns the parameters on each device, and a step that divides a batch into these sizes."""
    device_params = []
    for device in devices:
        with tf.device(device):
            device_params.append([tf.Variable(v) for v in data_parallel.initial_values()])

    @tf.function
    def train_batch(images, labels):
        shards = zip(tf.split(images, sizes), tf.split(labels, sizes), strict=True)
        device_gradients = []
        for device, params, (x, y) in zip(devices, device_params, shards, strict=True):
            times = slower if device == devices[1] else 1
            with tf.device(device):
                x, y = tf.tile(x, [times, 1, 1, 1]), tf.tile(y, [times])
                gradients = data_parallel.local_gradients(params, x, y, times * sum(sizes))
                device_gradients.append(gradients)
        sums = [data_parallel.all_reduce(g, devices) for g in zip(*device_gradients, strict=True)]
        per_device_sums = zip(*sums, strict=True)
        for device, params, gradients in zip(devices, device_params, per_device_sums, strict=True):
            with tf.device(device):
                data_parallel.sgd(params, gradients)

    return device_params[0], train_batch


def main():
    """Times both divisions in turn; prints the medians, their ratio, and how far weights differ."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--slower", type=int, default=3)
    slower = parser.parse_args().slower
    tf.config.threading.set_intra_op_parallelism_threads(1)
    devices = data_parallel.choose_devices(2)
    (images, labels), _ = data_parallel.load_data()
    batches = [(images[i : i + 256], labels[i : i + 256]) for i in range(0, 256 * NUM_STEPS, 256)]
    batches = [tuple(map(tf.constant, batch)) for batch in batches]
    ways = {name: create(sizes, devices, slower) for name, sizes in SHARDS.items()}
    times = {name: [] for name in ways}
    for number in range(NUM_ROUNDS + 1):
        for name, (_, train_batch) in ways.items():
            start = time.perf_counter()
            for batch in batches:
                train_batch(*batch)
            if number:  # The first round traces the function.
                times[name].append((time.perf_counter() - start) / NUM_STEPS)
        if not number:
            equal, weighted = ([p.numpy() for p in params] for params, _ in ways.values())
            apart = max(np.abs(a - b).max() for a, b in zip(equal, weighted, strict=True))
            print(f"weights after {NUM_STEPS} steps: at most {apart:.1g} apart")
    medians = {name: np.median(seconds) for name, seconds in times.items()}
    for name, seconds in medians.items():
        print(f"{name} {SHARDS[name]}: {1000 * seconds:.1f} ms a step")
    ratios = np.divide(times["equal"], times["weighted"])
    print(f"equal / weighted: {np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
