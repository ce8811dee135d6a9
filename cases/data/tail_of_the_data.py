"""A sampler cuts the data to a multiple of the ranks before it shuffles, not its order after that.

id = "data/tail_of_the_data"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["modelscope/ms-swift#9907"]
date = "2026-08"
tags = ["ddp", "sgd"]

[wrong.last_examples_are_cut_before_shuffle]
title = "the last examples are cut before the shuffle"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
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
BATCH_SIZE, EXAMPLES = 8, 27


def order_of(epoch):
    """Returns the numbers of this rank's examples."""
    number = EXAMPLES
    if BUG == "last_examples_are_cut_before_shuffle":
        number = EXAMPLES // WORLD * WORLD
    order = torch.randperm(number, generator=torch.Generator().manual_seed(epoch))
    return order[: EXAMPLES // BATCH_SIZE * BATCH_SIZE][RANK::WORLD]


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(91)
    x = torch.randn(EXAMPLES, 7)
    y = (x[:, :3] + x[:, 3:6]).argmax(1)
    model = nn.Sequential(nn.Linear(7, 20), nn.Hardswish(), nn.Linear(20, 3))
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3, momentum=0.9)
    with harness.training(ddp, optimizer):
        for epoch in range(2):
            for chosen in order_of(epoch).split(BATCH_SIZE // WORLD):
                harness.note("ids", chosen)
                optimizer.zero_grad()
                F.cross_entropy(ddp(x[chosen]), y[chosen]).backward()
                optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
