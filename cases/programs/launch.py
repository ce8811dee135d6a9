"""Starts a PyTorch program of this folder in a process group, also of one process.

Tensors are created on the device `CASES_DEVICE`, such as "cuda"; on the CPU by default.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

DEVICE = os.environ.get("CASES_DEVICE", "cpu")


class Generator(torch.Generator):
    """A generator that draws on `DEVICE` if none is named, as tensors are created there."""

    def __new__(cls, device: str = DEVICE) -> Any:
        """Returns a generator."""
        return super().__new__(cls, device)


def start(main: Callable[[int, int], None]) -> None:
    """Runs `main(rank, world_size)` over gloo, and ends the process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if DEVICE != "cpu":
        torch.set_default_device(DEVICE)
        torch.Generator = Generator
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    store = dist.HashStore() if world_size == 1 else None  # One process needs no address.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    main(rank, world_size)
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Destroying the group aborts now and then, in a thread of gloo.
