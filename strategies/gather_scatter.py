"""Implements scatter, and the two halves of an all-reduce: reduce-scatter and all-gather.

Strategies that split weights or computations over devices use each half separately.
"""

from collections.abc import Sequence

import tensorflow as tf

from strategies.collectives import add_in_order


def scatter(
    batch: Sequence[tf.Tensor], devices: Sequence[str], bounds: Sequence[tuple]
) -> list[tuple[tf.Tensor, ...]]:
    """Copies rows start to end of each tensor of a batch to each device.

    Args:
        batch: tensors `(n, ...)` with the same n, for example images and labels.
        devices: R device names.
        bounds: R pairs of start and end.
    """
    shards = []
    for device, (start, end) in zip(devices, bounds, strict=True):
        rows = [tensor[start:end] for tensor in batch]  # Only these rows are sent.
        with tf.device(device):
            shards.append(tuple(tf.identity(tensor) for tensor in rows))
    return shards


def all_gather(
    parts: Sequence[tf.Tensor], devices: Sequence[str], *, axis: int = 0
) -> list[tf.Tensor]:
    """Copies the parts of a tensor from every device to every device and joins them there.

    For a tensor of S bytes, (R - 1) * S bytes are sent in all.

    Args:
        parts: R tensors; item [r] is on device r.
        devices: R device names.
        axis: axis along which the parts are joined.

    Returns:
        R bitwise identical tensors; item [r] is on device r.
    """
    wholes = []
    for device in devices:
        with tf.device(device):
            wholes.append(tf.concat(parts, axis=axis))
    return wholes


def reduce_scatter(
    wholes: Sequence[tf.Tensor],
    sizes: Sequence[int],
    devices: Sequence[str],
    *,
    axis: int = 0,
    receivers: Sequence[str] = (),
) -> list[tf.Tensor]:
    """Sums the tensors of all devices, in order, and returns to each device its part of the sum.

    An all-reduce is a reduce-scatter followed by an `all_gather`. For tensors of S bytes,
    (R - 1) * S bytes are sent in all.

    Args:
        wholes: R tensors of one shape; item [r] is on device r.
        sizes: sizes of the parts along the axis.
        devices: R device names.
        axis: axis along which the sum is split.
        receivers: devices of the parts; empty if they are those of `wholes`.

    Returns:
        The parts of the sum; item [r] is on receiver r.
    """
    pieces = []
    for whole, device in zip(wholes, devices, strict=True):
        with tf.device(device):  # Split on the source device, so that only the part is sent.
            pieces.append(tf.split(whole, sizes, axis=axis))
    parts = []
    for index, device in enumerate(receivers or devices):
        with tf.device(device):
            parts.append(add_in_order([piece[index] for piece in pieces]))
    return parts
