"""An iterable data set is split over the workers of a loader, but not over the ranks.

id = "data/iterable_by_worker"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/datasets#5360", "Lightning-AI/pytorch-lightning#15734"]
date = "2022-12"
tags = ["ddp", "loader", "sgd"]

[wrong.split_by_workers_only]
title = "split by workers only"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }

[wrong.split_by_ranks_only]
title = "split by ranks only"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORKERS = 2


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info().id
        first, every = worker + WORKERS * RANK, WORKERS * WORLD
        if BUG == "split_by_workers_only":
            first, every = worker, WORKERS
        elif BUG == "split_by_ranks_only":
            first, every = RANK, WORLD
        for number in range(first, 64, every):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(5, generator=generator)
            yield x, x.abs().argmax()


def main():
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(5, 24), nn.GELU(), nn.Linear(24, 5))
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(Stream(), batch_size=8 // WORLD, num_workers=WORKERS)
    with harness.training(model, optimizer):
        for _, (x, y) in zip(range(2), loader, strict=False):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
