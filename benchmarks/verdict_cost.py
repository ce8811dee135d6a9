"""Measures what a verdict costs: processor time and memory against the size of the recordings.

python benchmarks/verdict_cost.py [largest number of weights, in millions]

Trains a multilayer perceptron with PyTorch in one process and in several, records both, and times
`lockstep.engine.verify`. Each row changes one size: weights, ranks, or steps. Needs an interpreter
with PyTorch.
"""

import math
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
BATCH, LAYERS = 64, 4
VERIFIES = """
import sys
from lockstep.data.file import load
from lockstep.engine import verify
print("status:", verify(*map(load, sys.argv[1:])).status)
"""
# Weights in millions, ranks, recorded steps.
SIZES = (
    *((weights, 2, 2) for weights in (1, 10, 31, 100)),
    *((weights, 8, 2) for weights in (1, 10)),
    *((3, ranks, 1) for ranks in (2, 4, 8)),
    *((3, 2, steps) for steps in (1, 3, 10)),
)


def train(rank: int, world_size: int, weights: float, steps: int, folder: str) -> None:
    """Trains and records; the main function of a process."""
    import torch
    import torch.distributed as dist

    from lockstep import record_torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    method = f"file://{folder}/rendezvous{world_size}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size)
    width = math.isqrt(int(weights * 1e6) // LAYERS)
    layers = [
        part for _ in range(LAYERS) for part in (torch.nn.Linear(width, width), torch.nn.Tanh())
    ]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    name, replay = ("one", None) if world_size == 1 else ("two", f"{folder}/one.npz")
    with record_torch.record(f"{folder}/{name}.npz", model, optimizer, steps=steps, replay=replay):
        for _ in range(steps):
            x = torch.randn(BATCH, width).chunk(world_size)[rank]
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


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
    import torch.multiprocessing

    print(f"| Weights | Ranks | Steps | Files | Verdict | Memory |\n|{' --- |' * 6}")
    for weights, ranks, steps in SIZES:
        if weights > float(largest):
            continue
        with tempfile.TemporaryDirectory() as folder:
            for number in (1, ranks):
                torch.multiprocessing.start_processes(
                    train, (number, weights, steps, folder), nprocs=number, start_method="spawn"
                )
            num_bytes = sum(path.stat().st_size for path in pathlib.Path(folder).glob("*.npz"))
            compared = [f"{folder}/one.npz", f"{folder}/two.npz"]
            seconds, memory, told = cost_of([sys.executable, "-c", VERIFIES, *compared])
        if "status: clean" not in told:
            sys.exit(f"error: {weights} M weights, {ranks} ranks, {steps} steps: {told}")
        size = f"| {weights} M | {ranks} | {steps} | {num_bytes / 1e6:,.0f} MB"
        print(f"{size} | {seconds:.1f} s | {memory:.2f} GB |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
