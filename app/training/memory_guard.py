"""Rejects a batch that does not fit into memory, before the training or when memory runs out."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from app.config import TrainConfig
from app.devices.device_setup import Devices
from app.devices.free_memory import available_bytes
from app.runtime.errors import is_out_of_memory
from app.training.memory_estimate import StepSize, check_memory, too_large
from strategies.base import Strategy
from strategies.workers import Workers


class MemoryGuard:
    """Compares the memory of a training step with the free memory.

    Args:
        strategy: a built strategy.
        config: options of the training.
        devices: devices of all workers.
        global_batch_size: size of the largest batch.
    """

    def __init__(
        self, strategy: Strategy, config: TrainConfig, devices: Devices, global_batch_size: int
    ) -> None:
        self._strategy, self._devices = strategy, devices
        self._size = StepSize.of(config, strategy.num_devices, global_batch_size)
        self._on_cpu = "CPU" in devices.names[0]

    def check(self) -> None:
        """Checks that a step fits into main memory; does not check the memory of GPUs.

        Raises:
            DeviceError: a step needs more than is free.
        """
        if self._on_cpu:
            check_memory(available=self._available_on_all_machines(), **self._step())

    @contextlib.contextmanager
    def naming_errors(self, is_within_epoch: Callable[[], bool]) -> Iterator[None]:
        """Converts out-of-memory errors of an epoch to an error with a batch size that fits.

        Args:
            is_within_epoch: returns whether steps are being trained, not the test set evaluated.

        Raises:
            DeviceError: a step ran out of memory.
        """
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error) and is_within_epoch():
                free = available_bytes() if self._on_cpu else None
                raise too_large(available=free, **self._step()) from error
            raise

    def _available_on_all_machines(self) -> int | None:
        """Returns free bytes: the number of machines times the minimum over the workers."""
        workers, cluster = self._devices.workers or Workers(), self._devices.cluster
        free = available_bytes()
        available = -workers.all_reduce_max(-math.inf if free is None else -free)[0]
        if math.isinf(available):
            return None
        return int(available) * (cluster.num_machines if cluster else 1)

    def _step(self) -> dict[str, Any]:
        """Returns the arguments of the memory estimate of a step."""
        first = self._strategy.copies()[0]  # The strategy's optimizer may hold only a part.
        return {
            "model": self._strategy.model,
            "optimizer_variables": [v for name, v in first.items() if name.startswith("optimizer")],
            "size": self._size,
        }
