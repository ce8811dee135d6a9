"""Keras: `compile` and `fit`, under `MirroredStrategy` on logical CPU devices if there are several.

What is not the default, and why:

- The example numbers are shuffled, and a batch is gathered with one operation: several times less
  work than shuffling and stacking 60,000 single images.
- The tuning thread of `tf.data` is off, because with it the end of an epoch now and then waits for
  seconds, with idle processors, and the benchmark would compare that.
- Operations get the cores divided by the replicas as threads, so that replicas that work side by
  side do not fight for the same cores.
"""

import os

import protocol

if __name__ == "__main__":
    JOB = protocol.open_job(["lenet", "resnet18"])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import contextlib

import keras
import tensorflow as tf
from keras import layers


def create_strategy(num_devices: int):
    """Cuts the CPU into logical devices and mirrors over them; hides GPUs.

    Returns:
        A strategy, or for one device nothing that has a `scope`.
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


def build_lenet() -> keras.Model:
    """Builds LeNet for float images."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(20, 3, activation="relu"),
            layers.AveragePooling2D(2),
            layers.Conv2D(50, 5, activation="relu"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ],
        name="lenet",
    )


def build_resnet18() -> keras.Model:
    """Builds ResNet-18 for float images: a 3 × 3 stem, no pooling before the end."""
    images = keras.Input((28, 28, 1))
    x = layers.Conv2D(64, 3, padding="same")(images)
    x = layers.ReLU()(_batch_norm()(x))
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            x = _residual_block(x, width, strides=2 if stage > 0 and block == 0 else 1)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(10)(x), name="resnet18")


def _residual_block(x, width, strides):
    y = layers.Conv2D(width, 3, strides=strides, padding="same")(x)
    y = layers.ReLU()(_batch_norm()(y))
    y = layers.Conv2D(width, 3, padding="same")(y)
    y = _batch_norm()(y)
    if strides > 1:
        x = layers.Conv2D(width, 1, strides=strides, padding="same")(x)
    return layers.ReLU()(layers.Add()([x, y]))


def _batch_norm():
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)


BUILDERS = {"lenet": build_lenet, "resnet18": build_resnet18}


class KerasTrainer:
    """A compiled model and its data.

    Args:
        job: what to train.
    """

    def __init__(self, job: protocol.Job):
        self._job = job
        strategy = create_strategy(job.num_devices)
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            self._model = BUILDERS[job.model]()
            self._model.compile(
                optimizer=keras.optimizers.SGD(job.learning_rate),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        protocol.check_num_parameters(
            job, sum(int(tf.size(w)) for w in self._model.trainable_weights)
        )
        data = job.data
        self._epoch = self._dataset(data.train_images, data.train_labels, shuffle=True)
        self._endless = self._dataset(
            data.train_images, data.train_labels, shuffle=True, repeat=True
        )
        self._test_data = self._dataset(data.test_images, data.test_labels)

    def warm_up(self) -> None:
        """Compiles training and testing, then takes the weights back."""
        weights = self._model.get_weights()
        self.train_steps(protocol.NUM_WARMUP_STEPS)
        self._model.evaluate(self._test_data.take(1), verbose=0)
        self._model.set_weights(weights)

    def train_steps(self, num_steps: int) -> tuple[int, float]:
        """Makes one call of `fit`, which begins with an epoch; returns images and mean loss."""
        if num_steps == len(self._job.epoch_slices):
            history = self._model.fit(self._epoch, shuffle=False, verbose=0)
        else:
            history = self._model.fit(
                self._endless, steps_per_epoch=num_steps, shuffle=False, verbose=0
            )
        return self._job.num_images(num_steps), history.history["loss"][-1]

    def evaluate(self) -> float:
        """Returns the part of the test images that is classified rightly."""
        return self._model.evaluate(self._test_data, verbose=0, return_dict=True)["accuracy"]

    def _dataset(self, images, labels, *, shuffle=False, repeat=False):
        """Makes batches of float images and labels."""
        images, labels = tf.constant(images), tf.constant(labels)

        def fetch(indices):
            batch = tf.cast(tf.gather(images, indices), tf.float32) / 255
            return batch, tf.gather(labels, indices)

        num_examples = len(images)
        dataset = tf.data.Dataset.range(num_examples)
        if shuffle:
            dataset = dataset.shuffle(num_examples)
        dataset = dataset.batch(self._job.global_batch_size)
        if shuffle:  # Without a short last batch that cannot be cut into equal shards.
            dataset = dataset.take(len(self._job.epoch_slices))
        if repeat:
            dataset = dataset.repeat()
        options = tf.data.Options()
        options.autotune.enabled = False
        return dataset.map(fetch).prefetch(2).with_options(options)


def main(job: protocol.Job) -> None:
    """Warms up and serves requests."""
    trainer = KerasTrainer(job)
    trainer.warm_up()
    protocol.serve(
        protocol.describe(job, tensorflow=tf.__version__, keras=keras.__version__),
        protocol.training_handlers(trainer.train_steps, trainer.evaluate),
    )


if __name__ == "__main__":
    main(JOB)
