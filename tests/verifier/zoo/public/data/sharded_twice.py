"""The loader is split by its sampler, and once more by `Accelerator.prepare`.

reference = "huggingface/accelerate#4201, huggingface/accelerate#3520"
date = "2026-09"
framework = "torch"

[wrong]
"sampler and prepare split" = ["other_examples", "lost_examples", "other_order"]
"slice of the rank and prepare split" = ["other_examples", "lost_examples", "other_order"]
"""

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import lockstep

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH = 8


def make_loader():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=generator)
    data = TensorDataset(x, x[:, :1].sin() + x[:, 1:2] * x[:, 2:3])
    sampler = None
    if BUG == "sampler and prepare split":
        sampler = DistributedSampler(data, WORLD, RANK, shuffle=False)
    elif BUG == "slice of the rank and prepare split":
        data = Subset(data, range(RANK * 64 // WORLD, (RANK + 1) * 64 // WORLD))
    return DataLoader(data, BATCH // WORLD, sampler=sampler)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
    with lockstep.record(model, optimizer):
        for _, (x, y) in zip(range(2), loader, strict=False):
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
