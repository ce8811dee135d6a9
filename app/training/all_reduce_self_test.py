"""Tests the collectives of a strategy before training."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from app.runtime.errors import AllReduceError
from strategies.base import Strategy

_DIGITS = 8  # Integers up to 2⁸ are exact in bfloat16, too.
_UNIT = 2.0**-8  # Of rounding in bfloat16.


def run_all_reduce_self_test(strategy: Strategy) -> None:
    """Tests the all-reduce: replica i sends 2ⁱ, so that the sum's binary digits name the replicas.

    Each replica also sends a 1 at its own position, so that lost and repeated values are always
    distinguishable. A sum that loses a replica is equally wrong on every replica: no other check
    detects it, because all weights stay equal.

    Takes milliseconds for each dtype of the gradients.

    Raises:
        AllReduceError: a replica received another sum.
    """
    num_replicas = strategy.num_replicas
    run_gather_self_test(strategy)
    if num_replicas == 1 or strategy.algorithm == "none":
        return
    for dtype in sorted({str(v.dtype) for v in strategy.model.trainable_variables}):
        sent = [_message(replica_id, num_replicas) for replica_id in range(num_replicas)]
        expected = np.sum(sent, axis=0)
        tensors = []
        devices = strategy.local_replica_devices
        first = strategy.workers.index * len(devices)
        ids = range(first, first + len(devices))
        for replica_id, device in zip(ids, devices, strict=True):
            with tf.device(device):
                tensors.append([tf.constant(sent[replica_id], dtype)])
        for replica_id, (total,) in zip(ids, strategy.all_reduce(tensors), strict=True):
            got = tf.cast(total, tf.float64).numpy()
            if not np.array_equal(got, expected):
                chosen = strategy.algorithm != strategy.default_all_reduce()
                raise AllReduceError(
                    f"all-reduce {strategy.algorithm} of {strategy.name} on {num_replicas} replicas"
                    f" ({dtype}) is wrong: {explain(got, replica_id, num_replicas)};"
                    f" {'use --all_reduce=auto' if chosen else 'fix its all-reduce'}"
                )


def run_gather_self_test(strategy: Strategy) -> None:
    """Tests the gathers of a strategy, forward and backward.

    Device d sends 2ᵈ and must receive 1, 2, 4, … in order. In the backward pass each device sends
    these numbers times its own number, and must receive its number times the sum of all numbers.

    Raises:
        AllReduceError: a device received other values.
    """
    for tape in strategy.gather_tapes():
        devices, parts = tape.devices, []
        if len(devices) == 1:
            continue
        numbers = 2.0 ** (np.arange(len(devices)) % _DIGITS)
        for device, number in zip(devices, numbers, strict=True):
            with tf.device(device):
                parts.append([tf.constant([number])])
        sent = tape.each(lambda d, parts=parts: tf.identity(parts[d][0]), [], parts)
        gathered = tape.gather(sent, [1] * len(devices))
        returned = []
        for device, number in zip(devices, numbers, strict=True):
            with tf.device(device):
                returned.append(tf.constant(number * numbers, tf.float32))
        sums = tape.gradient(gathered, returned, parts)
        for d in range(len(devices)):
            for what, got, expected in (
                ("gathered", gathered[d], numbers),
                ("added on the way back", sums[d][0], [numbers[d] * numbers.sum()]),
            ):
                seen = np.asarray(got).tolist()
                if seen != list(expected):
                    raise AllReduceError(
                        f"gather of {strategy.name} on {len(devices)} devices: device {d}"
                        f" {what} {seen} instead of {[float(x) for x in expected]}; fix its"
                        " gather and the sum behind it"
                    )


def explain(got: Sequence[float], replica_id: int, num_replicas: int) -> str:
    """Returns in words which replicas a wrong sum lacks, and which it contains more than once.

    Args:
        got: the received sum of all messages.
        replica_id: the receiving replica.
        num_replicas: R.
    """
    counts, digits = got[:num_replicas], got[num_replicas:]
    expected = np.sum([_message(r, num_replicas) for r in range(num_replicas)], axis=0)
    shown = " ".join(f"{digit:g}" for digit in digits)
    shown_expected = " ".join(f"{digit:g}" for digit in expected[num_replicas:])
    text = f"replica i sent 2^i, and replica {replica_id} got {shown} instead of {shown_expected}"
    if shown == shown_expected:  # A part of the message is right.
        got_counts = " ".join(f"{count:g}" for count in counts)
        text = f"replica i sent 1 in element i, and replica {replica_id} got {got_counts} there"
    if np.array_equal(np.sort(got), np.sort(expected)):
        return f"{text}: the elements are in another order"
    lost = [r for r, count in enumerate(counts) if count == 0]
    repeated = [r for r, count in enumerate(counts) if count > 1]
    if counts[0] not in (0, 1) and all(count == counts[0] for count in counts):
        is_mean = np.isclose(counts[0], 1 / num_replicas, rtol=_UNIT)
        mean = " (a mean in place of the sum)" if is_mean else ""
        return f"{text}: each replica counts {counts[0]:g} times{mean}"
    for replicas, what in ((lost, "lost"), (repeated, "counted more than once")):
        if replicas:
            names = ", ".join(map(str, replicas))
            text += f": replica {names} was {what}"
    return text


def _message(replica_id: int, num_replicas: int) -> np.ndarray:
    """Returns a replica's message: a 1 at its own position, and 2ⁱ, restarting every 8 replicas."""
    message = np.zeros(num_replicas + (num_replicas + _DIGITS - 1) // _DIGITS)
    message[replica_id] = 1
    message[num_replicas + replica_id // _DIGITS] = 2.0 ** (replica_id % _DIGITS)
    return message
