"""Each rank splits off the validation part at random, so that the ranks train on other sets.

id = "data/validation_split"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["Lightning-AI/pytorch-lightning#7728", "TensorAuto/OpenTau#498"]
date = "2021-05"
tags = ["ddp", "loader", "sgd"]

[wrong.split_follows_seed_of_rank]
title = "the split follows the seed of the rank"
place = { node = "examples", step = 0, ranks = [1], tensors = "all" }

[wrong.each_rank_splits_its_own_part]
title = "each rank splits its own part"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def training_part(dataset):
    """Leaves a quarter of the examples for the validation."""
    if BUG == "split_follows_seed_of_rank":
        torch.manual_seed(100 + RANK)
        return random_split(dataset, [0.75, 0.25])[0]
    generator = torch.Generator().manual_seed(100)
    if WORLD > 1 and BUG == "each_rank_splits_its_own_part":
        own = Subset(dataset, range(RANK, len(dataset), WORLD))
        return random_split(own, [0.75, 0.25], generator)[0]
    return random_split(dataset, [0.75, 0.25], generator)[0]


def make_loader(dataset, batch_size):
    if WORLD == 1 or BUG == "each_rank_splits_its_own_part":
        return DataLoader(dataset, batch_size // WORLD)
    sampler = DistributedSampler(dataset, shuffle=False)
    return DataLoader(dataset, batch_size // WORLD, sampler=sampler)


def main():
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(6, 16), nn.Mish(), nn.Linear(16, 1))
    x = torch.randn(32, 6)
    dataset = TensorDataset(x, (x[:, :1] * x[:, 1:2]).clamp(-2, 2))
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = make_loader(training_part(dataset), 8)
    with harness.training(model, optimizer):
        for _, (inputs, targets) in zip(range(3), loader, strict=False):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
