"""Trains with Keras' `compile` and `fit`, with `MirroredStrategy` on several logical CPU devices.

Choices and reasons:

- One `fit` with `steps_per_epoch` over an infinite dataset. When `fit` deletes an iterator, as it
does
  after each epoch of a finite dataset, `tf.data`'s autotuning thread sometimes delays it by up to
  twice the time of the epoch, with idle processors. Turning autotuning off helps on one device, but
  under the strategy there are iterators without access to this option.
- A thread therefore runs `fit` permanently, and every request for steps is an epoch of it.
- Example indices are shuffled, and one operation gathers a batch: less work than shuffling and
  stacking 60,000 images.
- Operations get the cores divided by the replicas as threads: 8 % faster with 2 on 2 cores.
- With 2 replicas TensorFlow rejects `steps_per_execution` above 1. On one device, 10 steps per call
  save a tenth of a step of LeNet (`--num_devices=1 --steps_per_execution=10`); both are compared.
  The steps of a block must be a multiple of it.
- XLA is off: under the strategy it fails, and on one device LeNet takes 1.8 times as long.
"""

import argparse
import os
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))

import protocol


def check_flags(flags: argparse.Namespace) -> str | None:
    """Returns the error in a combination of flags, or None."""
    if flags.steps_per_execution > 1 and flags.num_devices > 1:
        return "--steps_per_execution: MirroredStrategy refuses it; use --num_devices=1 with it"
    return None


if __name__ == "__main__":
    FLAGS = {
        **protocol.PRECISION_FLAG,
        "steps_per_execution": {"type": int, "default": 1},
    }
    JOB = protocol.open_job(["lenet", "resnet18"], flags=FLAGS, check=check_flags)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import contextlib
import gc
import queue
import threading

import keras
import tensorflow as tf

from models import load_model_builder


def create_strategy(num_devices: int):
    """Splits the CPU into logical devices and creates a strategy; hides GPUs.

    Returns:
        A strategy; for one device, an object with an empty `scope`.
    """
    tf.config.set_visible_devices([], "GPU")
    if num_devices == 1:
        return None
    tf.config.threading.set_intra_op_parallelism_threads(
        max(1, protocol.num_cores() // num_devices)
    )
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices
    )
    return tf.distribute.MirroredStrategy([f"/CPU:{i}" for i in range(num_devices)])


class Turns(keras.callbacks.Callback):
    """Lets a `fit` in another thread continue by one epoch per order."""

    def __init__(self):
        super().__init__()
        self._orders, self._results = queue.SimpleQueue(), queue.SimpleQueue()

    def on_train_begin(self, logs=None):
        """Reports that everything is prepared, and waits for the first order."""
        self._pause(logs)

    def on_epoch_end(self, epoch, logs=None):
        """Reports the metrics of the epoch, and waits for the next order."""
        self._pause(logs)

    def _pause(self, result):
        self._results.put(result)
        if self._orders.get() == "stop":
            self.model.stop_training = True

    def order(self, what: str) -> None:
        """Tells the waiting `fit` to "go" on by an epoch or to "stop"."""
        self._orders.put(what)

    def fail(self, error: BaseException) -> None:
        """Reports the exception that ended `fit`."""
        self._results.put(error)

    def result(self) -> dict | None:
        """Waits for the end of an order and returns the metrics; raises the exception of `fit`."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result


class KerasTrainer:
    """A compiled model and its data.

    Args:
        job: the training.
    """

    def __init__(self, job: protocol.BenchmarkJob):
        self._job = job
        strategy = create_strategy(job.num_devices)
        keras.utils.set_random_seed(0)
        if job.options["precision"] == "bfloat16":
            keras.config.set_dtype_policy("mixed_bfloat16")
        with strategy.scope() if strategy else contextlib.nullcontext():
            build = load_model_builder(job.model)
            self._model = build(image_shape=(28, 28, 1), num_classes=10)
            self._model.compile(
                optimizer=keras.optimizers.SGD(job.learning_rate),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
                jit_compile=False,
                steps_per_execution=job.options["steps_per_execution"],
            )
        protocol.check_num_parameters(
            job, sum(int(tf.size(w)) for w in self._model.trainable_weights)
        )
        data = job.data
        self._train_data = self._dataset(data.train_images, data.train_labels, endless=True)
        self._test_data = self._dataset(data.test_images, data.test_labels)
        self._turns, self._thread = Turns(), None
        self._steps_per_turn, self._num_steps = 0, 0

    def warm_up(self) -> None:
        """Compiles training and testing, then restores the weights."""
        weights = self._model.get_weights()
        num_steps = max(protocol.NUM_WARMUP_STEPS, self._job.options["steps_per_execution"])
        self.prepare(num_steps)
        self.train_steps(num_steps)
        self._stop()
        self._model.evaluate(self._test_data.take(1), verbose=0)
        self._model.set_weights(weights)

    def prepare(self, num_steps: int) -> None:
        """Prepares a waiting `fit` with `num_steps` steps per epoch.

        Ends a `fit` with another number; the new one starts an epoch of the data.

        Raises:
            ValueError: the steps are not a multiple of `steps_per_execution`.
        """
        if num_steps % self._job.options["steps_per_execution"]:
            raise ValueError(f"{num_steps} steps are not a multiple of --steps_per_execution")
        if self._thread and num_steps == self._steps_per_turn:
            return
        self._stop()
        self._steps_per_turn, self._num_steps = num_steps, 0
        self._turns = Turns()
        self._thread = threading.Thread(target=self._fit, args=(self._turns,), daemon=True)
        self._thread.start()
        self._turns.result()

    def train_steps(self, num_steps: int) -> tuple[int, float]:
        """Runs the prepared steps; returns the number of images and their mean loss."""
        self._turns.order("go")
        logs = self._turns.result()
        num_images = self._job.num_images(self._num_steps + num_steps)
        num_images -= self._job.num_images(self._num_steps)
        self._num_steps += num_steps
        return num_images, logs["loss"]

    def evaluate(self) -> float:
        """Returns the test accuracy."""
        return self._model.evaluate(self._test_data, verbose=0, return_dict=True)["accuracy"]

    def _fit(self, turns):
        try:
            self._model.fit(
                self._train_data,
                steps_per_epoch=self._steps_per_turn,
                epochs=1_000_000,  # Until it is stopped.
                shuffle=False,  # The dataset shuffles.
                callbacks=[turns],
                verbose=0,
            )
        except BaseException as error:
            turns.fail(error)

    def _stop(self):
        if self._thread:
            self._turns.order("stop")
            self._thread.join()
            self._thread = None
            gc.collect()  # So that deleting its iterators does not delay later steps.

    def _dataset(self, images, labels, *, endless=False):
        """Creates batches of float images and labels; if endless, shuffled."""
        images, labels = tf.constant(images), tf.constant(labels)

        def fetch(indices):
            batch = tf.cast(tf.gather(images, indices), tf.float32) / 255
            return batch, tf.gather(labels, indices)

        dataset = tf.data.Dataset.range(len(images))
        if endless:
            dataset = dataset.shuffle(len(images))
        dataset = dataset.batch(self._job.global_batch_size)
        if endless:  # Drop a short last batch, which may not split into equal shards.
            dataset = dataset.take(len(self._job.epoch_slices)).repeat()
        options = tf.data.Options()
        options.autotune.enabled = False
        return dataset.map(fetch).prefetch(2).with_options(options)


def main(job: protocol.BenchmarkJob) -> None:
    """Warms up and serves requests."""
    trainer = KerasTrainer(job)
    trainer.warm_up()
    protocol.serve(
        protocol.describe(
            job,
            ("MirroredStrategy" if job.num_devices > 1 else "one device with all cores")
            + f", steps_per_execution {job.options['steps_per_execution']}",
            tensorflow=tf.__version__,
            keras=keras.__version__,
        ),
        protocol.training_handlers(trainer.train_steps, trainer.evaluate, prepare=trainer.prepare),
    )


if __name__ == "__main__":
    main(JOB)
