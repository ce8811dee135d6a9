"""Models that train in milliseconds, and strategies that have built them."""

import functools

import keras
import tensorflow as tf

from app.data.fashion_mnist import IMAGE_SHAPE, NUM_CLASSES
from models import load_model_builder
from models.resnet import build_resnet
from strategies import load_strategy_class
from tests.conftest import CPUS
from tests.dense_network import build_conv_norm_network

SHAPES = {"image_shape": IMAGE_SHAPE, "num_classes": NUM_CLASSES}


def build_network(name):
    """Builds the model of that name for Fashion-MNIST."""
    return load_model_builder(name)(**SHAPES)


def deep_network():
    """Builds three layers, of which the variables have paths without a prefix."""
    images = keras.Input(IMAGE_SHAPE, dtype="uint8")
    x = keras.layers.Rescaling(1 / 255)(images)
    x = keras.layers.Conv2D(5, 5, strides=4, activation="relu", name="conv")(x)
    x = keras.layers.AveragePooling2D(2, name="pool")(x)
    x = keras.layers.Flatten(name="flat")(x)
    x = keras.layers.Dense(9, activation="relu", name="hidden")(x)
    return keras.Model(images, keras.layers.Dense(NUM_CLASSES, name="logits")(x), name="deep")


def scaled(network):
    """Puts the scaling of a recipe before a network that takes numbers from 0 to 1."""
    images = keras.Input(IMAGE_SHAPE, dtype="uint8")
    return keras.Model(images, network(keras.layers.Rescaling(1 / 255)(images)))


def deep_norm_network():
    """Builds a network with BatchNorm, for tests of the split into shards."""
    return scaled(build_conv_norm_network(**SHAPES))


def lenet():
    return scaled(build_network("lenet"))


def resnet18():
    return scaled(build_network("resnet18"))


def small_resnet():
    """Builds one residual block, for BatchNorm without 18 layers."""
    network = build_resnet(name="one_block", stage_widths=(4,), blocks_per_stage=1, **SHAPES)
    return scaled(network)


def momentum_sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def create(name, num_replicas, build=deep_network, optimizer_fn=None, **options):
    strategy = load_strategy_class(name)(CPUS[:num_replicas], **options)
    assert strategy.num_replicas == num_replicas
    keras.utils.set_random_seed(7)  # Replicas draw different weights.
    strategy.build(build, optimizer_fn or (lambda: keras.optimizers.SGD(0.1)))
    return strategy


@functools.cache
def mirrored(num):
    strategy = tf.distribute.MirroredStrategy(
        CPUS[:num],
        # Collectives keep the group of devices of the first strategy of a process.
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    assert strategy.num_replicas_in_sync == num
    return strategy
