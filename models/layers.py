"""Defines two layers of Keras a second time, with the same results in less time on CPUs.

ResNet-18 is built of Keras' own layers, but for these two: `Conv2D` and
`BatchNormalization`. Each is a subclass that replaces one method; weights, names, arguments and
results (but for rounding) are those of Keras, and `keras.layers.Conv2D` in its place is the same
model. Read them as a lesson in what a framework costs, or not at all: no strategy and no check
depends on them. They stand here because Keras leaves a part of a CPU unused: with Keras' layers a
whole training step of ResNet-18 takes 1.11 times as long in float32 (quartiles 1.104 to 1.119) and
1.44 times in bfloat16 (1.425 to 1.455), and as long without oneDNN (1.00). That was measured in
turns, with a batch of 128 on two cores with AVX-512 and instructions for bfloat16. On GPUs, the
convolution is Keras' own.
"""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

# Bytes of a number → output pixels of an image up to which a matrix product is faster.
_PIXELS_OF_PRODUCT = {2: 49, 4: 16}


class Conv2D(keras.layers.Conv2D):
    """Convolves small images by a matrix product.

    If an image has fewer numbers than the kernel, oneDNN spends most of a convolution's time on the
    order of the kernel's numbers in memory, which the product leaves as it is. On GPUs, cuDNN
    convolves.
    """

    def convolution_op(self, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """Returns the convolution without a bias; `call` of Keras' layer calls it."""
        most = _PIXELS_OF_PRODUCT.get(tf.as_dtype(inputs.dtype).size, 0)
        is_small = np.prod(self.compute_output_shape(inputs.shape)[1:3]) <= most
        is_plain = self.padding == "same" and self.groups == 1 and self.dilation_rate == (1, 1)
        has_patches = self.kernel_size != (1, 1)
        has_gpu = bool(tf.config.get_visible_devices("GPU"))
        if is_small and is_plain and has_patches and not has_gpu:
            return _convolve_by_product(inputs, tf.convert_to_tensor(kernel), self.strides)
        return super().convolution_op(inputs, kernel)


def _convolve_by_product(
    images: tf.Tensor, kernel: tf.Tensor, strides: tuple[int, int]
) -> tf.Tensor:
    """Convolves images `(n, height, width, c)` with a kernel `(k, l, c, d)`, padding "same"."""
    positions, (rows, columns) = _positions(images.shape[1:3], kernel.shape[:2], strides)
    num_pixels, num_channels = images.shape[1] * images.shape[2], images.shape[3]

    @tf.custom_gradient
    def convolve(images: tf.Tensor, kernel: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        # One pixel of zeros is appended for the padding.
        flat = tf.reshape(images, (-1, num_pixels, num_channels))
        padded = tf.pad(flat, [[0, 0], [0, 1], [0, 0]])
        patches = tf.reshape(tf.gather(padded, positions, axis=1), (-1, np.prod(kernel.shape[:3])))
        product = tf.matmul(patches, tf.reshape(kernel, (-1, kernel.shape[3])))

        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            by_images = tf.raw_ops.Conv2DBackpropInput(
                input_sizes=tf.shape(images), filter=kernel, out_backprop=upstream,
                strides=[1, *strides, 1], padding="SAME",
            )  # fmt: skip
            flat = tf.reshape(upstream, (-1, kernel.shape[3]))
            by_kernel = tf.matmul(patches, flat, transpose_a=True)
            return by_images, tf.reshape(by_kernel, kernel.shape)

        return tf.reshape(product, (-1, rows, columns, kernel.shape[3])), gradient

    return convolve(images, kernel)


def _positions(
    image: tuple[int, int], kernel: tuple[int, int], strides: tuple[int, int]
) -> tuple[np.ndarray, tuple[int, int]]:
    """Returns the pixels that each output pixel is computed from, and the output's two sizes.

    Returns:
        Numbers of the pixels of a flattened image, patch after patch; for padding, the number of
        pixels.
    """
    sizes, axes = [], []
    for size, length, step in zip(image, kernel, strides, strict=True):
        num = -(-size // step)
        before = max((num - 1) * step + length - size, 0) // 2
        axes.append(np.arange(num)[:, None] * step + np.arange(length) - before)
        sizes.append(num)
    rows, columns = axes[0][:, None, :, None], axes[1][None, :, None, :]
    is_inside = (rows >= 0) & (rows < image[0]) & (columns >= 0) & (columns < image[1])
    numbers = np.where(is_inside, rows * image[1] + columns, image[0] * image[1])
    return numbers.ravel().astype(np.int32), (sizes[0], sizes[1])


class BatchNormalization(keras.layers.BatchNormalization):
    """Normalises images in one operation forward and one backward; Keras uses five and twelve.

    Statistics and arithmetic are in float32 with images in 16 bits, as in Keras' layer.
    """

    def call(
        self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Normalises images `(n, height, width, c)`; updates the moving statistics in training."""
        is_whole = self.synchronized or self.dtype_policy.variable_dtype == "float64"
        if not training or not self.trainable or is_whole or not isinstance(inputs, tf.Tensor):
            return super().call(inputs, training=training, mask=mask)
        none = tf.zeros([0])  # Moving statistics are not an input in training.
        outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=inputs, scale=self.gamma, offset=self.beta, mean=none, variance=none,
            epsilon=self.epsilon, is_training=True,
        )  # fmt: skip
        count = tf.cast(tf.size(inputs) // inputs.shape[-1], tf.float32)
        variance *= (count - 1) / count  # The operation divides the sum of squares by count - 1.
        for moving, new in ((self.moving_mean, mean), (self.moving_variance, variance)):
            moving.assign(moving * self.momentum + new * (1 - self.momentum))
        return outputs
