"""Trains with Keras' `compile` and `fit`, with `MirroredStrategy` on several logical CPU devices.

Choices and reasons:

- One `fit` over an infinite dataset, in a thread; every request for steps is an epoch of it. When
  `fit` deletes an iterator, as it does after each epoch of a finite dataset, `tf.data`'s autotuning
  thread sometimes delays it by up to twice the time of the epoch, with idle processors.
- Example indices are shuffled, and one operation gathers a batch: less work than shuffling and
  stacking 60,000 images.
- Operations get the cores divided by the replicas as threads: 8 % faster with 2 on 2 cores.
- On one device, a call runs 10 steps, which saves a tenth of a step of LeNet; `MirroredStrategy`
  refuses more than 1.
- XLA is off: under the strategy it fails, and on one device LeNet takes 1.8 times as long.
"""

import contextlib
import queue
import threading

import keras
import numpy as np
import tensorflow as tf

from models import load_model_builder
from program import Job, num_threads


class Turns(keras.callbacks.Callback):
    """Lets a `fit` in another thread continue by one epoch for each turn."""

    def __init__(self) -> None:
        super().__init__()
        self._orders: queue.SimpleQueue = queue.SimpleQueue()
        self._results: queue.SimpleQueue = queue.SimpleQueue()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Waits for the next turn."""
        self._orders.get()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Reports the end of a turn."""
        self._results.put(None)

    def fit(self, model: keras.Model, data: tf.data.Dataset, num_steps: int) -> None:
        """Trains for ever; reports an exception."""
        try:
            model.fit(
                data, steps_per_epoch=num_steps, epochs=1_000_000, shuffle=False, callbacks=[self],
                verbose=0,
            )  # fmt: skip
        except BaseException as error:
            self._results.put(error)

    def take(self) -> None:
        """Lets `fit` train an epoch, and waits for its end."""
        self._orders.put(None)
        if error := self._results.get():
            raise error


class Training:
    """A training that is warmed up; the steps of a request are fixed."""

    def __init__(self, job: Job) -> None:
        self.versions = {"tensorflow": tf.__version__, "keras": keras.__version__}
        self._job, self._num_steps = job, 0
        tf.config.set_visible_devices([], "GPU")
        scope = contextlib.nullcontext()
        if job.num_devices > 1:
            tf.config.threading.set_intra_op_parallelism_threads(num_threads(job))
            (cpu,) = tf.config.list_physical_devices("CPU")
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * job.num_devices
            )
            names = [f"/CPU:{i}" for i in range(job.num_devices)]
            scope = tf.distribute.MirroredStrategy(names).scope()
        keras.utils.set_random_seed(0)
        if job.precision == "bfloat16":
            keras.config.set_dtype_policy("mixed_bfloat16")
        with scope:
            self._model = load_model_builder(job.model)(image_shape=(28, 28, 1), num_classes=10)
            self._model.compile(
                optimizer=keras.optimizers.SGD(job.learning_rate),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"], jit_compile=False,
                steps_per_execution=10 if job.num_devices == 1 else 1,
            )  # fmt: skip
        job.check_parameters(sum(int(tf.size(w)) for w in self._model.trainable_weights))
        self._turns, data = Turns(), self._batches(*job.data[0])
        fit = self._turns.fit
        arguments = self._model, data, job.num_steps
        threading.Thread(target=fit, args=arguments, daemon=True).start()
        self.train_steps(job.num_steps)

    def train_steps(self, num_steps: int) -> int:
        """Trains the steps of a request; returns the number of images."""
        self._turns.take()
        sizes = [where.stop - where.start for where in self._job.epoch_slices()]
        first, self._num_steps = self._num_steps, self._num_steps + num_steps
        return sum(sizes[step % len(sizes)] for step in range(first, self._num_steps))

    def evaluate(self) -> float:
        """Returns the test accuracy, outside of the strategy."""
        images, labels = self._job.data[1]
        logits = self._model(images.astype(np.float32) / 255, training=False)
        return float((keras.ops.convert_to_numpy(logits).argmax(1) == labels).mean())

    def _batches(self, images: np.ndarray, labels: np.ndarray) -> tf.data.Dataset:
        images, labels = tf.constant(images), tf.constant(labels)

        def fetch(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            batch = tf.cast(tf.gather(images, rows), tf.float32) / 255
            return batch, tf.gather(labels, rows)

        rows = tf.data.Dataset.range(len(images)).shuffle(len(images))
        rows = rows.batch(self._job.global_batch_size).take(len(self._job.epoch_slices()))
        options = tf.data.Options()
        options.autotune.enabled = False
        return rows.repeat().map(fetch).prefetch(2).with_options(options)
