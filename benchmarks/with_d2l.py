"""Trains LeNet with the step of `examples/data_parallel.py`, eagerly, as the chapter does.

Nothing is compiled. In eager mode the devices of one process run one after another, each operation
with all threads.
"""

import numpy as np
import tensorflow as tf

import data_parallel
from program import NUM_WARMUP_STEPS, Job


class Training:
    """A training that is warmed up."""

    def __init__(self, job: Job) -> None:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_visible_devices([], "GPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * job.num_devices
        )
        self.versions, self._job = {"tensorflow": tf.__version__}, job
        self._devices = [f"/CPU:{i}" for i in range(job.num_devices)]
        self._restart()
        self.train_steps(NUM_WARMUP_STEPS)
        self._restart()

    def _restart(self) -> None:
        values = data_parallel.initial_values()
        self._params, _, train_batch = data_parallel.by_hand(None, values, self._devices)
        self._train_batch = train_batch.python_function
        self._job.check_parameters(sum(value.size for value in values))
        self._batches = self._job.index_batches()

    def _make_step(self, rows: np.ndarray) -> None:
        images, labels = self._job.data[0]
        self._train_batch(tf.constant(images[rows]), tf.constant(labels[rows], tf.int32))

    def train_steps(self, num_steps: int) -> int:
        """Trains; returns the number of images."""
        num_images = self._job.train(self._batches, num_steps, self._make_step)
        self._params[0][-1].numpy()  # Waits for the last step.
        return num_images

    def evaluate(self) -> float:
        """Returns the test accuracy."""
        images, labels = self._job.data[1]
        logits = data_parallel.lenet(self._params[0], images)
        return float((logits.numpy().argmax(1) == labels).mean())
