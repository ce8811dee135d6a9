"""The smallest architecture that a recipe can train; it can take LeNet's place in `models/`."""

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
    """Builds the smallest network that a pipeline can cut into three stages."""
    images = keras.Input(image_shape)
    x = keras.layers.Flatten()(images)
    for name, units in (("first", 12), ("second", 12), ("logits", num_classes)):
        x = keras.layers.Dense(units, kernel_initializer=kernel_initializer, name=name)(x)
    return keras.Model(images, x, name="dense")


build_lenet = build_dense_network
