"""Compares implementations of LeNet's second convolution and its two gradients.

.venv/bin/python benchmarks/conv_study.py [--rounds=9]

All variants are timed in turn on one thread, by processor time; the minimum of the rounds is
reported. Each line has the operations of the convolution over those of a matrix product in the same
time, without counting padding.
"""

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

EXAMPLES = 128  # A shard of 256 images on two devices.
HEIGHT, KERNEL, IN, OUT = 13, 5, 20, 50  # LeNet's `conv2`, without padding.
CALLS = 6  # Of a variant per round.

Variant = tuple[str, Callable[[], tf.Tensor]]


def random(*shape: int) -> tf.Tensor:
    """Returns normally distributed random numbers."""
    return tf.random.stateless_normal(shape, seed=(1, len(shape)))


def out_height() -> int:
    """Returns height and width of the convolution's output."""
    return HEIGHT - KERNEL + 1


def convolution(num_in: int, num_out: int) -> list[Variant]:
    """Returns the convolution and its gradients with these numbers of channels."""
    images = random(EXAMPLES, HEIGHT, HEIGHT, num_in)
    kernel = random(KERNEL, KERNEL, num_in, num_out)
    gradient = random(EXAMPLES, out_height(), out_height(), num_out)
    options = {"strides": [1] * 4, "padding": "VALID"}

    def forward() -> tf.Tensor:
        return tf.raw_ops.Conv2D(input=images, filter=kernel, **options)

    def image_gradient() -> tf.Tensor:
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=images.shape, filter=kernel, out_backprop=gradient, **options
        )

    def kernel_gradient() -> tf.Tensor:
        return tf.raw_ops.Conv2DBackpropFilter(
            input=images, filter_sizes=kernel.shape, out_backprop=gradient, **options
        )

    return [
        ("forward", forward),
        ("gradient of the images", image_gradient),
        ("gradient of the kernel", kernel_gradient),
    ]


def matrix_products() -> list[Variant]:
    """Returns the convolution as products of matrices whose rows are patches of the images."""
    images, kernel = random(EXAMPLES, HEIGHT, HEIGHT, IN), random(KERNEL * KERNEL * IN, OUT)
    gradient = random(EXAMPLES * out_height() ** 2, OUT)
    square = [1, KERNEL, KERNEL, 1]

    def cut(batch: tf.Tensor) -> tf.Tensor:
        patches = tf.image.extract_patches(batch, square, [1] * 4, [1] * 4, "VALID")
        return tf.reshape(patches, [-1, KERNEL * KERNEL * IN])

    def image_gradient() -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(images)
            patches = cut(images)
        return tape.gradient(patches, images, tf.matmul(gradient, kernel, transpose_b=True))

    return [
        ("forward", lambda: tf.matmul(cut(images), kernel)),
        ("gradient of the images", image_gradient),
        ("gradient of the kernel", lambda: tf.matmul(cut(images), gradient, transpose_a=True)),
    ]


def compiled_by_xla() -> list[Variant]:
    """Returns the convolution compiled by XLA."""
    return [
        (name, tf.function(function, autograph=False, jit_compile=True))
        for name, function in convolution(IN, OUT)
    ]


def measure(variants: dict[str, list[Variant]], rounds: int) -> dict[tuple[str, str], float]:
    """Returns (variant, computation) → the shortest processor time of a call, in seconds."""
    functions = {
        (title, name): tf.function(function, autograph=False)
        for title, parts in variants.items()
        for name, function in parts
    }
    for function in functions.values():
        function()  # Compiles it.
    shortest = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for key, function in functions.items():
            start = time.process_time()
            for _ in range(CALLS):
                function()
            shortest[key] = min(shortest[key], (time.process_time() - start) / CALLS)
    return shortest


def main() -> None:
    """Measures all variants and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    size = 2048
    left, right = random(size, size), random(size, size)
    variants = {
        "product of matrices": [("product", lambda: tf.matmul(left, right))],
        "20 → 50 channels, as in LeNet": convolution(IN, OUT),
        "20 → 64, padded": convolution(IN, 64),
        "32 → 50, padded": convolution(32, OUT),
        "32 → 64, padded": convolution(32, 64),
        "20 → 50, patches and a product": matrix_products(),
        "20 → 50, XLA": compiled_by_xla(),
    }
    secs = measure(variants, options.rounds)
    peak = 2 * size**3 / secs.pop(("product of matrices", "product"))
    needed = 2 * EXAMPLES * out_height() ** 2 * KERNEL**2 * IN * OUT
    print(f"peak: {peak / 1e9:.0f} GFLOP/s on one thread, matrices of {size} × {size}\n")
    print("| channels, method | forward | gradient of the images | gradient of the kernel | sum |")
    print("| --- | --- | --- | --- | --- |")
    for title in list(variants)[1:]:
        parts = [sec for (variant, _), sec in secs.items() if variant == title]
        cells = [f"{1000 * sec:.2f} ms, {needed / sec / peak:.2f}" for sec in parts]
        total = sum(parts)
        cells.append(f"{1000 * total:.1f} ms, {3 * needed / total / peak:.2f}")
        print(f"| {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
