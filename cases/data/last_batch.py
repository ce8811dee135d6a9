"""The last batch cannot be split evenly: it is filled up, dropped, or averaged by rank.

id = "data/last_batch"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#22584", "pytorch/pytorch#67253"]
date = "2019-07"
tags = ["loader", "adam"]

[wrong.filled_up_with_repeated_examples]
title = "filled up with repeated examples"
place = { node = "examples", step = 1, ranks = [1], tensors = "all" }

[wrong.last_batch_is_dropped]
title = "last batch is dropped"
place = { node = "examples", step = 1, ranks = "all", tensors = "all" }

[wrong.mean_of_ranks_means]
title = "mean of the ranks' means"
place = { node = "loss", step = 1, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH, EXAMPLES, STEPS = 8, 11, 2


def endless(loader):
    while True:
        yield from loader


def reduce(value):
    if WORLD > 1:
        dist.all_reduce(value)
    return value


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(8)
    x = torch.randn(EXAMPLES, 7)
    data = TensorDataset(x, (3 * x[:, 0]).cos() + x[:, 1])
    sampler = range(RANK, EXAMPLES, WORLD)
    if BUG == "filled_up_with_repeated_examples":
        sampler = DistributedSampler(data, WORLD, RANK, shuffle=False)
    is_dropped = BUG == "last_batch_is_dropped"
    loader = DataLoader(data, BATCH // WORLD, sampler=sampler, drop_last=is_dropped)
    model = nn.Sequential(nn.Linear(7, 24), nn.ReLU(), nn.Linear(24, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-2)
    with harness.training(model, optimizer):
        for _, (x, y) in zip(range(STEPS), endless(loader), strict=False):
            count = reduce(torch.tensor(float(len(x))))
            if BUG == "mean_of_ranks_means":
                count = torch.tensor(float(len(x) * WORLD))
            optimizer.zero_grad()
            (nn.functional.huber_loss(model(x), y, reduction="sum") / count).backward()
            for p in model.parameters():
                reduce(p.grad)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
