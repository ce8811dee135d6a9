"""Pictures are scaled to a size that is drawn in each step, the same one on all ranks.

id = "random/size_of_pictures"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["open-mmlab/mmdetection#1083"]
date = "2019-07"
tags = ["ddp", "sgd"]

[wrong.each_rank_draws_size_of_its_own]
title = "each rank draws a size of its own"
place = { node = "random", step = 1, ranks = [1], tensors = "all" }
"""

import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZES = 12, (6, 8, 10, 12)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(112)
    sizes = random.Random(3 + (RANK if BUG == "each_rank_draws_size_of_its_own" else 0))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2),
        nn.ELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2, momentum=0.9)
    with harness.training(ddp, optimizer):
        for step in range(3):
            pictures = torch.randn(
                BATCH_SIZE, 1, 8, 8, generator=torch.Generator().manual_seed(step)
            )
            ids = torch.arange(BATCH_SIZE).chunk(WORLD)[RANK]
            harness.note("ids", ids + step * BATCH_SIZE)
            labels = pictures.flatten(1)[:, :4].argmax(1)[ids]
            size = sizes.choice(SIZES)
            scaled = F.interpolate(pictures[ids], size=(size, size), mode="bilinear")
            optimizer.zero_grad()
            F.cross_entropy(ddp(scaled), labels).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
