"""Implements the eager data parallelism of "Dive into Deep Learning" on logical CPUs.

A TensorFlow version of the code in section "Training on Multiple GPUs": lists of parameters, a
network of `tf.nn` functions, a tape for each device, an all-reduce through device 0, updates with
`assign_sub`. Nothing is compiled. In eager mode the devices of one process run one after another,
each operation with all threads.

One difference: `tf.data`'s autotuning is off, because with it the end of an epoch sometimes waits
for seconds with idle processors, which would be measured.
"""

import os

import protocol

if __name__ == "__main__":
    JOB = protocol.open_job(["lenet"])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf


def create_devices(num_devices: int) -> list[str]:
    """Splits the CPU into logical devices and returns their names; hides GPUs."""
    tf.config.set_visible_devices([], "GPU")
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices
    )
    return [f"/CPU:{i}" for i in range(num_devices)]


def initial_params() -> list[tf.Tensor]:
    """Draws LeNet's weights from N(0, 0.01²); biases are 0."""
    scale = 0.01
    return [
        tf.random.normal((3, 3, 1, 20)) * scale,
        tf.zeros(20),
        tf.random.normal((5, 5, 20, 50)) * scale,
        tf.zeros(50),
        tf.random.normal((800, 128)) * scale,
        tf.zeros(128),
        tf.random.normal((128, 10)) * scale,
        tf.zeros(10),
    ]


def get_params(params: list[tf.Tensor], device: str) -> list[tf.Variable]:
    """Copies the parameters into variables on a device."""
    with tf.device(device):
        return [tf.Variable(param) for param in params]


def lenet(images, params):
    """Computes logits `(n, 10)` of float images `(n, 28, 28, 1)`."""
    w1, b1, w2, b2, w3, b3, w4, b4 = params
    x = tf.nn.relu(tf.nn.conv2d(images, w1, strides=1, padding="VALID") + b1)
    x = tf.nn.avg_pool2d(x, ksize=2, strides=2, padding="VALID")
    x = tf.nn.relu(tf.nn.conv2d(x, w2, strides=1, padding="VALID") + b2)
    x = tf.nn.avg_pool2d(x, ksize=2, strides=2, padding="VALID")
    x = tf.reshape(x, (x.shape[0], -1))
    x = tf.nn.relu(tf.matmul(x, w3) + b3)
    return tf.matmul(x, w4) + b4


def summed_loss(logits, labels):
    """Sums the cross-entropies of a shard."""
    return tf.reduce_sum(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    )


def split_batch(images, labels, devices):
    """Splits a batch into equal shards, each on its device."""
    shards = []
    for x, y, device in zip(
        tf.split(images, len(devices)), tf.split(labels, len(devices)), devices, strict=True
    ):
        with tf.device(device):
            shards.append((tf.identity(x), tf.identity(y)))
    return shards


def all_reduce(tensors, devices):
    """Sums tensors, one per device, on device 0 and copies the sum to every device."""
    with tf.device(devices[0]):
        total = tensors[0]
        for tensor in tensors[1:]:
            total = total + tf.identity(tensor)
    copies = []
    for device in devices:
        with tf.device(device):
            copies.append(tf.identity(total))
    return copies


def sgd(params, gradients, learning_rate, num_examples):
    """Applies a step of gradient descent with gradients that are sums over `num_examples`."""
    for param, gradient in zip(params, gradients, strict=True):
        param.assign_sub(learning_rate * gradient / num_examples)


def train_batch(images, labels, device_params, devices, learning_rate):
    """Runs one step on all devices; returns each device's summed loss."""
    losses, device_gradients = [], []
    for (x, y), params, device in zip(
        split_batch(images, labels, devices), device_params, devices, strict=True
    ):
        with tf.device(device), tf.GradientTape() as tape:
            loss = summed_loss(lenet(x, params), y)
        losses.append(loss)
        device_gradients.append(tape.gradient(loss, params))
    # From one list per device to one list per parameter, and back.
    summed = [all_reduce(parts, devices) for parts in zip(*device_gradients, strict=True)]
    for params, gradients, device in zip(
        device_params, zip(*summed, strict=True), devices, strict=True
    ):
        with tf.device(device):
            sgd(params, gradients, learning_rate, images.shape[0])
    return losses


class D2lTrainer:
    """Runs the training of d2l step by step.

    Args:
        job: the training.
    """

    def __init__(self, job: protocol.BenchmarkJob):
        self._job = job
        self._devices = create_devices(job.num_devices)
        data = job.data
        self._train_data = self._without_tuning(
            tf.data.Dataset.from_tensor_slices(self._process(data.train_images, data.train_labels))
            .shuffle(len(data.train_images))
            .batch(job.global_batch_size)
            .take(len(job.epoch_slices))
        )
        self._test_data = self._without_tuning(
            tf.data.Dataset.from_tensor_slices(
                self._process(data.test_images, data.test_labels)
            ).batch(job.global_batch_size)
        )
        self.restart()
        protocol.check_num_parameters(job, sum(int(tf.size(p)) for p in self._device_params[0]))

    def restart(self) -> None:
        """Draws new weights and starts an epoch."""
        tf.random.set_seed(0)
        params = initial_params()
        self._device_params = [get_params(params, device) for device in self._devices]
        self._batches = self._epochs()

    def train_steps(self, num_steps: int) -> tuple[int, float]:
        """Runs `num_steps` steps; returns the number of images and their mean loss."""
        num_images, losses = 0, []
        for _ in range(num_steps):
            images, labels = next(self._batches)
            losses += train_batch(
                images, labels, self._device_params, self._devices, self._job.learning_rate
            )
            num_images += images.shape[0]
        return num_images, float(sum(loss.numpy() for loss in losses)) / num_images

    def evaluate(self) -> float:
        """Returns the test accuracy, computed on device 0 as in d2l."""
        num_correct = 0
        with tf.device(self._devices[0]):
            for images, labels in self._test_data:
                classes = tf.argmax(lenet(images, self._device_params[0]), axis=1)
                right = tf.equal(tf.cast(classes, labels.dtype), labels)
                num_correct += int(tf.reduce_sum(tf.cast(right, tf.int32)))
        return num_correct / len(self._job.data.test_labels)

    def _epochs(self):
        while True:
            yield from self._train_data

    @staticmethod
    def _process(images, labels):
        return images.astype(np.float32) / 255, labels.astype(np.int32)

    @staticmethod
    def _without_tuning(dataset):
        options = tf.data.Options()
        options.autotune.enabled = False
        return dataset.with_options(options)


def main(job: protocol.BenchmarkJob) -> None:
    """Warms up, discards the results, and serves requests."""
    trainer = D2lTrainer(job)
    trainer.train_steps(protocol.NUM_WARMUP_STEPS)
    trainer.evaluate()
    trainer.restart()
    protocol.serve(
        protocol.describe(job, "eager, one tape for each device", tensorflow=tf.__version__),
        protocol.training_handlers(trainer.train_steps, trainer.evaluate),
    )


if __name__ == "__main__":
    main(JOB)
