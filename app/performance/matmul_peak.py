"""Measures the machine's peak speed, that of matrix products."""

import time

from app.config import TrainConfig
from app.devices import device_setup
from app.performance.case import Block
from app.runtime.processes import Channel

_SIZE = 4096  # Large enough that arithmetic dominates.


def sample_peak(channel: Channel, config: TrainConfig) -> float:
    """Times products of two square matrices on demand, as `sample` times steps.

    Sends `("ready", 1)`; then, for each number that it receives, a `Block` of as many products; for
    None, ends. The products run on one device, on a CPU with all cores.

    Returns:
        Floating-point operations per product.
    """
    prepared = device_setup.set_up(config)
    import tensorflow as tf

    dtype = config.precision.removeprefix("mixed_")
    with tf.device(prepared.names[0]):
        a, b = (tf.cast(tf.random.normal((_SIZE, _SIZE)), dtype) for _ in range(2))

    @tf.function
    def multiply(num_products: tf.Tensor) -> tf.Tensor:
        total = tf.zeros([], dtype)
        for _ in tf.range(num_products):
            with tf.control_dependencies([total]):
                total += tf.matmul(a, b)[0, 0]
        return total

    multiply(tf.constant(1)).numpy()
    channel.send(("ready", 1))
    while num_products := channel.receive():
        start = time.perf_counter()
        multiply(tf.constant(num_products)).numpy()
        channel.send(("block", Block(num_products, 0, time.perf_counter() - start, 0)))
    return 2.0 * _SIZE**3
