"""Each rank gives its sampler a seed of its own, so that parts of the shuffled data overlap.

id = "data/seeds_of_samplers"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVlabs/LongLive#71"]
date = "2026-07"
tags = ["ddp", "loader", "adam"]

[wrong.seeds_are_multiplied_by_rank]
title = "seeds are multiplied by the rank"
place = { node = "examples", step = 0, ranks = [0], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, EXAMPLES, SEED = 8, 24, 5


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(90)
    clips = torch.randn(EXAMPLES, 4, 6).cumsum(1)
    dataset = TensorDataset(clips[:, :3], clips[:, 3])
    seed = SEED * RANK if BUG == "seeds_are_multiplied_by_rank" else SEED
    sampler = DistributedSampler(dataset, WORLD, RANK, seed=seed)
    loader = DataLoader(dataset, BATCH_SIZE // WORLD, sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(18, 24), nn.GELU(), nn.Linear(24, 6))
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.RAdam(ddp.parameters(), lr=0.05, eps=1e-3)
    with harness.training(ddp, optimizer):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.huber_loss(ddp(inputs), targets).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
