"""The loader is split by its sampler, and once more by `Accelerator.prepare`.

id = "data/sharded_twice"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/accelerate#4201", "huggingface/accelerate#3520"]
date = "2026-09"
tags = ["loader", "sgd"]

[wrong.sampler_and_prepare_split]
title = "sampler and prepare split"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }

[wrong.slice_of_rank_and_prepare_split]
title = "slice of the rank and prepare split"
place = { node = "examples", step = 0, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH = 8


def make_loader():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=generator)
    data = TensorDataset(x, x[:, :1].sin() + x[:, 1:2] * x[:, 2:3])
    sampler = None
    if BUG == "sampler_and_prepare_split":
        sampler = DistributedSampler(data, WORLD, RANK, shuffle=False)
    elif BUG == "slice_of_rank_and_prepare_split":
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
    with harness.training(model, optimizer):
        for _, (x, y) in zip(range(2), loader, strict=False):
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
