"""A normalisation is synchronised over ranks whose batches are not equally large.

id = "averages/unequal_batches"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["PaddlePaddle/Paddle#32464", "mapillary/inplace_abn#68"]
date = "2018-11"
tags = ["sgd"]

[wrong.means_of_ranks_are_averaged]
title = "means of the ranks are averaged"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["1", "4"] }

[wrong.all_batches_are_taken_to_be_as_large_as_own]
title = "all batches are taken to be as large as the own"
place = { node = "update", step = 0, ranks = "all", tensors = ["1.variance", "4.variance"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PARTS = {1: [12], 2: [8, 4]}[WORLD]
MOMENTUM = 0.3


def total(x):
    return all_reduce(x) if WORLD > 1 else x


class SynchronisedNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))

    def over_all(self, x, number):
        """Returns the mean over the pixels of all ranks."""
        if BUG == "means_of_ranks_are_averaged":
            return total(x.mean((0, 2, 3))) / WORLD
        return total(x.sum((0, 2, 3))) / number

    def forward(self, x):
        number = total(torch.tensor(float(x[:, 0].numel())))
        mean = self.over_all(x, number)
        centred = x - mean[:, None, None]
        variance = self.over_all(centred.square(), number)
        with torch.no_grad():
            if BUG == "all_batches_are_taken_to_be_as_large_as_own":
                number = x[:, 0].numel() * WORLD
            self.mean.lerp_(mean, MOMENTUM)
            self.variance.lerp_(variance * number / (number - 1), MOMENTUM)
        scale = self.weight / (variance + 1e-4).sqrt()
        return centred * scale[:, None, None] + self.bias[:, None, None]


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(44)
    model = nn.Sequential(
        nn.Conv2d(1, 5, 3, 2, bias=False), SynchronisedNorm(5), nn.Hardswish(),
        nn.Conv2d(5, 6, 2, bias=False), SynchronisedNorm(6), nn.Tanh(), nn.Flatten(),
        nn.Linear(6, 3),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            images = torch.randn(12, 1, 5, 5, generator=torch.Generator().manual_seed(step))
            images[8:] = 2 * images[8:] + 1
            images = images.split(PARTS)[RANK]
            labels = images.flatten(1)[:, :3].argmax(1)
            optimizer.zero_grad()
            (F.cross_entropy(model(images), labels, reduction="sum") / 12).backward()
            for weight in model.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
