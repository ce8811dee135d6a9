"""Measures what a verdict costs: processor time and memory against the size of the recordings.

python benchmarks/verdict_cost.py [largest number of weights, in millions]

Trains a multilayer perceptron with PyTorch in one process and in several, records both, and times
`lockstep.engine.verify`. The measure beside it is a process that reads every array of the
recordings twice. Each row changes one size: weights, ranks, steps, or whole arrays for samples.
Needs an interpreter with PyTorch.
"""

import math
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
BATCH, LAYERS = 64, 4
READS_TWICE = """
import sys, zipfile, numpy as np
for path in sys.argv[1:] * 2:
    with np.load(path) as arrays:
        for name in arrays.files:
            arrays[name]
"""
VERIFIES = """
import sys
from lockstep.data.file import load
from lockstep.engine import verify
print("status:", verify(*map(load, sys.argv[1:])).status)
"""


class Size(NamedTuple):
    """The size of a training, and of its recordings.

    Attributes:
        weights: number of weights, in millions.
        ranks: number of processes.
        steps: number of recorded steps.
        sample: elements kept of each array; 0 for all.
        wrong: whether the gradients of the last process are lost.
    """

    weights: float
    ranks: int = 2
    steps: int = 1
    sample: int = 0
    wrong: bool = False


SIZES = [
    *(Size(weights, steps=2) for weights in (1, 10, 31, 100)),
    *(Size(weights, ranks=8, steps=2) for weights in (1, 10)),
    *(Size(weights, sample=4096) for weights in (1, 10, 100)),
    *(Size(3, ranks=ranks) for ranks in (2, 4, 8)),
    *(Size(3, steps=steps) for steps in (1, 3, 10)),
    *(Size(weights, wrong=True) for weights in (1, 10, 31)),
]


def train(rank: int, world_size: int, size: Size, folder: str) -> None:
    """Trains and records; the main function of a process."""
    import torch
    import torch.distributed as dist

    from lockstep import record_torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    method = f"file://{folder}/rendezvous{world_size}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size)
    width = math.isqrt(int(size.weights * 1e6) // LAYERS)
    layers = [
        part for _ in range(LAYERS) for part in (torch.nn.Linear(width, width), torch.nn.Tanh())
    ]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = f"{folder}/one.npz"
    with record_torch.record(
        f"{folder}/{'one' if world_size == 1 else 'two'}.npz", model, optimizer, steps=size.steps,
        sample=size.sample, start=bool(size.sample),
        replay=None if world_size == 1 else first,
    ):  # fmt: skip
        for _ in range(size.steps):
            x = torch.randn(BATCH, width).chunk(world_size)[rank]
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if size.wrong and rank and rank == world_size - 1:
                for weight in model.parameters():
                    weight.grad.zero_()
            optimizer.step()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def record(size: Size, folder: str) -> None:
    """Records the training in one process, and in several."""
    import torch.multiprocessing

    for number in (1, size.ranks):
        torch.multiprocessing.start_processes(
            train, (number, size, folder), nprocs=number, start_method="spawn"
        )


def cost_of(command: list[str]) -> tuple[float, float, str]:
    """Returns seconds of a processor, GB of memory at most, and what a command prints."""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout
        text = process.stdout.read()
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e6, text


def main(largest: str = "100") -> None:
    """Prints a row for each size."""
    header = "Weights", "Ranks", "Steps", "Elements kept", "Files", "Reading twice", "Verdict"
    header = (*header, "Memory")
    print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    for size in SIZES:
        if size.weights > float(largest):
            continue
        with tempfile.TemporaryDirectory() as folder:
            record(size, folder)
            paths = sorted(map(str, pathlib.Path(folder).glob("*.npz")))
            num_bytes = sum(os.path.getsize(path) for path in paths)
            reading, _, _ = cost_of([sys.executable, "-c", READS_TWICE, *paths])
            compared = [f"{folder}/one.npz", f"{folder}/two.npz"]
            seconds, memory, told = cost_of([sys.executable, "-c", VERIFIES, *compared])
        if f"status: {'fault' if size.wrong else 'clean'}" not in told:
            sys.exit(f"error: {size}: {told}")
        kept = str(size.sample or "all") + (", a fault" if size.wrong else "")
        sizes = f"{size.weights:g} M", size.ranks, size.steps, kept, f"{num_bytes / 1e6:,.0f} MB"
        cost = f"{reading:.1f} s", f"{seconds:.1f} s", f"{memory:.2f} GB"
        print(f"| {' | '.join(map(str, (*sizes, *cost)))} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
