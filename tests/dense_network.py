"""Small networks that can replace LeNet in `models/`."""

import keras


def build_dense_network(
    *, image_shape, num_classes, kernel_initializer="glorot_uniform"
) -> keras.Model:
    """Builds one dense layer."""
    images = keras.Input(image_shape)
    logits = keras.layers.Dense(num_classes, kernel_initializer=kernel_initializer, name="logits")
    return keras.Model(images, logits(keras.layers.Flatten()(images)), name="dense")


def build_three_dense_layers(
    *, image_shape, num_classes, kernel_initializer="glorot_uniform"
) -> keras.Model:
    """Builds the smallest network that can be cut into three pipeline stages."""
    images = keras.Input(image_shape)
    x = keras.layers.Flatten()(images)
    for name, units in (("first", 12), ("second", 12), ("logits", num_classes)):
        x = keras.layers.Dense(units, kernel_initializer=kernel_initializer, name=name)(x)
    return keras.Model(images, x, name="dense")


build_lenet = build_dense_network


def build_conv_norm_network(
    *, image_shape, num_classes, kernel_initializer="glorot_uniform"
) -> keras.Model:
    """Builds a network with BatchNorm, so that shards have their own statistics."""
    images = keras.Input(image_shape)
    x = keras.layers.Conv2D(4, 5, strides=4, kernel_initializer=kernel_initializer, name="conv")(
        images
    )
    x = keras.layers.ReLU(name="relu")(keras.layers.BatchNormalization(name="norm")(x))
    logits = keras.layers.Dense(num_classes, kernel_initializer=kernel_initializer, name="logits")
    return keras.Model(images, logits(keras.layers.Flatten(name="flat")(x)), name="norm")


def build_dropout_network(
    *, image_shape, num_classes, kernel_initializer="glorot_uniform"
) -> keras.Model:
    """Builds a network that uses random numbers in training."""
    images = keras.Input(image_shape)
    x = keras.layers.Dropout(0.5, seed=1)(keras.layers.Flatten()(images))
    logits = keras.layers.Dense(num_classes, kernel_initializer=kernel_initializer, name="logits")
    return keras.Model(images, logits(x), name="dropout")
