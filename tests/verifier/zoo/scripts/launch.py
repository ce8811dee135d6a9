"""Starts a script of this folder: `python SCRIPT.py REPLICAS FILE.npz [REPLAY.npz [SEED [each]]]`.

The script's `main` gets its rank, the number of processes and the arguments of the recorder.
Tensors are created on the device `LOCKSTEP_SCRIPTS_DEVICE`, such as "cuda"; on the CPU by default.
"""

import os
import sys
from collections.abc import Callable
from typing import Any


def arguments() -> tuple[int, dict[str, Any]]:
    """Returns the number of replicas, and the recorder's arguments, of the command line."""
    number, path, *others = sys.argv[1:]
    recording: dict[str, Any] = {"path": path}
    if others:
        recording["replay"] = others[0] or None
    if others[1:] and others[1]:
        recording["permute"] = int(others[1])
    if others[2:]:
        recording["shards"] = others[2]
    return int(number), recording


def start(main: Callable[[int, int, dict[str, Any]], None]) -> None:
    """Runs `main(rank, world_size, recording)` in as many processes as replicas, over gloo."""
    import torch.multiprocessing

    world_size, recording = arguments()
    torch.multiprocessing.start_processes(
        _run, (main, world_size, recording), nprocs=world_size, start_method="fork"
    )


def _generator_on(device: str) -> type:
    """Returns the class of generators that draw on a device if none is named, as tensors do."""
    import torch

    class Generator(torch.Generator):
        def __new__(cls, device: str = device) -> Any:
            return super().__new__(cls, device)

    return Generator


def _run(
    rank: int,
    main: Callable[[int, int, dict[str, Any]], None],
    world_size: int,
    recording: dict[str, Any],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = os.environ.get("LOCKSTEP_SCRIPTS_DEVICE", "cpu")
    if device != "cpu":
        torch.set_default_device(device)
        torch.Generator = _generator_on(device)
    method = f"file://{os.path.abspath(recording['path'])}.rendezvous"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size)
    main(rank, world_size, recording)
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Destroying the group aborts now and then, in a thread of gloo.
