"""Small networks that can replace LeNet in `models/`."""

import keras


def build_dense_network(
    *, image_shape, num_classes, kernel_initializer="glorot_uniform"
) -> keras.Model:
    """Builds one dense layer."""
    images = keras.Input(image_shape)
    logits = keras.layers.Dense(num_classes, kernel_initializer=kernel_initializer, name="logits")
    return keras.Model(images, logits(keras.layers.Flatten()(images)), name="dense")


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
