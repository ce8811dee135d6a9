"""BatchNorm normalises the examples of each replica by themselves.

Asked for since the first strategies on several GPUs. It is documented and no bug, but not the
training of one device either: with few examples for each replica, the gradient is a different one.
`synchronized=True` normalises the whole batch.
"""

import keras
import tensorflow as tf
from small import image_data

BUG = "tensorflow/tensorflow#7439"
LINK = "https://github.com/tensorflow/tensorflow/issues/7439"
STAGE = "forward"
CAUSE = "local_statistics"
STATUS = "by design"


def convolutional(synchronized: bool) -> keras.Model:
    network = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(8, 3, use_bias=False),
            keras.layers.BatchNormalization(synchronized=synchronized),
            keras.layers.ReLU(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(4),
        ],
        name="network",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss)
    return network


def model() -> keras.Model:
    return convolutional(synchronized=False)


def corrected_model() -> keras.Model:
    return convolutional(synchronized=True)


def data(global_batch_size: int) -> tf.data.Dataset:
    return image_data(global_batch_size)
