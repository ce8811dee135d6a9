"""Two loaders of the same pictures mix each with another, and draw the same ones.

id = "data/same_picture_mixed"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "charlesCXK/TorchSemiSeg#60",
    "charlesCXK/TorchSemiSeg#57",
    "charlesCXK/TorchSemiSeg#78",
]
date = "2022-04"
tags = ["ddp", "loader", "adam"]

[wrong.both_loaders_have_one_seed]
title = "both loaders have one seed"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }

[wrong.second_loader_has_seed_of_rank]
title = "the second loader has the seed of the rank"
place = { node = "examples", step = 0, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE, CLASSES = 8, 8, 3


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(2, 8, 4, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, CLASSES, 4, stride=2, padding=1)

    def forward(self, x):
        return self.up(F.softplus(self.down(x)))


def loader(dataset, seed):
    sampler = DistributedSampler(dataset, WORLD, RANK, seed=seed)
    return DataLoader(dataset, BATCH_SIZE // WORLD, sampler=sampler)


def mix(first, second):
    """Pastes a corner of the second pictures into the first ones."""
    mask = torch.zeros(SIZE, SIZE)
    mask[:5, :5] = 1
    return first * (1 - mask) + second * mask


def main():
    torch.manual_seed(12)
    pictures = torch.randn(16, 2, SIZE, SIZE)
    dataset = TensorDataset(pictures, (pictures[:, 0] + 2 * pictures[:, 1]).sign().long() + 1)
    model = Segmenter()
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    seed = 20
    if BUG == "both_loaders_have_one_seed":
        seed = 10
    elif BUG == "second_loader_has_seed_of_rank":
        seed = 20 + RANK
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.02, eps=1e-4)
    with harness.training(model, optimizer):
        for first, second in zip(loader(dataset, 10), loader(dataset, seed), strict=True):
            inputs, labels = mix(first[0], second[0]), mix(first[1], second[1]).long()
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
