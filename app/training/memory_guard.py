"""Ends a training whose batch does not fit into memory, in one line that names the batch."""

import contextlib
import math
from collections.abc import Callable, Iterator

import tensorflow as tf

from app.devices.device_setup import Devices
from app.devices.free_memory import available_bytes
from app.options import Config
from app.runtime import console
from app.runtime.errors import DeviceError, is_out_of_memory
from strategies.base import Strategy
from strategies.cuts import product_layers


class MemoryGuard:
    """Describes a batch that does not fit.

    Args:
        strategy: a built strategy.
        config: options of the training.
        devices: devices of this process.
        global_batch_size: size of the largest batch.
    """

    def __init__(
        self, strategy: Strategy, config: Config, devices: Devices, global_batch_size: int
    ) -> None:
        self._strategy, self._global_batch_size = strategy, global_batch_size
        self._on_cpu = "CPU" in devices.names[0] and not config.distribution.recompute

    def check(self) -> None:
        """Rejects a batch that certainly does not fit into main memory.

        Linux ends a process that uses more memory than there is, so that nothing could be reported.

        Raises:
            DeviceError: the outputs of the layers need more than is free.
        """
        least, free = self._least_bytes(), available_bytes()
        if self._on_cpu and free is not None and least > free:
            gib, fits = 2**30, self._global_batch_size * free // least
            reason = f"needs at least {least / gib:.1f} GiB, {free / gib:.1f} are free"
            raise self._error(reason, at_most=fits)

    @contextlib.contextmanager
    def naming_errors(self, is_within_epoch: Callable[[], bool]) -> Iterator[None]:
        """Converts out-of-memory errors of an epoch to an error that names the batch.

        Args:
            is_within_epoch: returns whether steps are being trained, not the test set evaluated.

        Raises:
            DeviceError: a step ran out of memory.
        """
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error) and is_within_epoch():
                raise self._error("does not fit") from error
            raise

    def _least_bytes(self) -> int:
        """Returns the bytes of the convolutions' and products' outputs, kept for the gradients."""
        strategy = self._strategy
        per_image = sum(
            math.prod(layer.output.shape[1:]) * tf.as_dtype(layer.compute_dtype).size
            for layer in product_layers(strategy.model)
        )
        num_local = len(strategy.local_replica_devices)
        num_shards = strategy.num_replicas * strategy.shards_per_replica
        return self._global_batch_size * num_local * per_image // num_shards

    def _error(self, reason: str, at_most: float = math.inf) -> DeviceError:
        size, num = self._global_batch_size, self._strategy.num_replicas
        half = int(min(size // 2, at_most)) // num * num
        advice = (
            f"use --global_batch_size={half} or less"
            if half
            else "use fewer devices or a machine with more memory"
        )
        return DeviceError(
            f"out of memory: --global_batch_size={size}, which is {-(-size // num):,} images on"
            f" each of {console.count(num, 'replica')}, {reason}; {advice}"
        )
