"""The two halves of an all-reduce: a sum in parts (reduce-scatter), and parts on every device.

Strategies that hold weights in parts, or compute in parts, use each by itself.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from strategies.collectives import add_in_order


def all_gather(
    parts: Sequence[tf.Tensor], devices: Sequence[str], *, axis: int = 0
) -> list[tf.Tensor]:
    """Copies the parts of a tensor, one of each device, to every device, and joins them there.

    Of S bytes each device receives what the others have of them: (R - 1) * S bytes in all.

    Args:
        parts: R tensors; item [r] is on device r.
        devices: R device names.
        axis: along which the tensor is in parts.

    Returns:
        R tensors with the same bits; item [r] is on device r.
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
    on_pieces: Callable[[int, list[tf.Tensor]], list[tf.Tensor]] = lambda index, pieces: pieces,
) -> list[tf.Tensor]:
    """Adds tensors of all devices, in order; each device gets its part of the sum.

    An all-reduce is this and an `all_gather`. Of S bytes each device sends the others their parts:
    (R - 1) * S bytes in all.

    Args:
        wholes: R tensors of one shape; item [r] is on device r.
        sizes: of the parts, along the axis.
        devices: R device names.
        axis: along which the sum is split.
        receivers: the devices of the parts; empty where they are those of `wholes`.
        on_pieces: is given the number of a part and the pieces that make it up, one of each
            device, and returns what is added.

    Returns:
        The parts of the sum; item [r] is on receiver r.
    """
    pieces = []
    for whole, device in zip(wholes, devices, strict=True):
        with tf.device(device):  # Split where it is: of each tensor only the part travels.
            pieces.append(tf.split(whole, sizes, axis=axis))
    parts = []
    for index, device in enumerate(receivers or devices):
        with tf.device(device):
            parts.append(add_in_order(on_pieces(index, [piece[index] for piece in pieces])))
    return parts
