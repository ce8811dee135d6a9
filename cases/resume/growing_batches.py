"""Batches grow with the examples that all ranks have seen, also when a run is resumed.

id = "resume/growing_batches"
framework = "torch"
processes = 2
steps = 5
mode = "resume"
references = ["AI-Hypercomputer/maxtext#2656", "microsoft/ltp-megatron-lm#20"]
date = "2025-05"
tags = ["ddp", "sgd"]

[wrong.growth_starts_again]
title = "growth starts again"
place = { node = "examples", step = 3, ranks = "all", tensors = "all" }

[wrong.examples_of_own_rank_are_counted]
title = "examples of the own rank are counted"
place = { node = "examples", step = 2, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
FIRST, GROWTH, EVERY, SIZE, STEPS, SAVED_STEPS = 8, 4, 16, 6, 5, 3


def main():
    save, load = os.environ.get("SAVE"), os.environ.get("LOAD")
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(223)
    model = nn.Sequential(nn.Linear(SIZE, 16), nn.Mish(), nn.Linear(16, 2))
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2, momentum=0.9)
    first = seen = 0
    if load:
        state = torch.load(load)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        seen = 0 if BUG == "growth_starts_again" else state["seen"]
    last = SAVED_STEPS if save else STEPS
    with harness.training(ddp, optimizer):
        for step in range(first, last):
            size = FIRST + GROWTH * (seen // EVERY)
            x = torch.randn(size, SIZE, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            seen += len(x) if BUG == "examples_of_own_rank_are_counted" else size
            optimizer.zero_grad()
            F.cross_entropy(ddp(x), (x[:, 0] > x[:, 1]).long()).backward()
            optimizer.step()
    if save and RANK == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"step": last, "seen": seen}, save)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
