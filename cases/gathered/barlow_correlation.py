"""The correlation matrix of two views is summed over ranks by an operation without a gradient.

id = "gathered/barlow_correlation"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "lightly-ai/lightly#1977",
    "facebookresearch/barlowtwins#8",
    "facebookresearch/vissl#230",
]
date = "2026-07"
tags = ["ddp", "sgd"]

[wrong.sum_over_ranks_has_no_backward_pass]
title = "the sum over ranks has no backward pass"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.features_are_standardised_on_each_rank]
title = "features are standardised on each rank"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn import functional as collectives
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, REDUNDANCY = 16, 0.02


def mean_of_ranks(x):
    return collectives.all_reduce(x) / WORLD if WORLD > 1 else x


def standardise(z):
    """Returns features with mean 0 and variance 1 over the batch of all ranks."""
    average = (lambda x: x) if BUG == "features_are_standardised_on_each_rank" else mean_of_ranks
    z = z - average(z.mean(0))
    return z / (average((z * z).mean(0)) + 1e-4).sqrt()


def barlow_loss(first, second):
    correlation = standardise(first).T @ standardise(second) / BATCH_SIZE
    if WORLD > 1 and BUG == "sum_over_ranks_has_no_backward_pass":
        dist.all_reduce(correlation)
    elif WORLD > 1:
        correlation = collectives.all_reduce(correlation)
    same = torch.eye(len(correlation), dtype=torch.bool)
    return ((correlation[same] - 1) ** 2).sum() + REDUNDANCY * (correlation[~same] ** 2).sum()


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 16, bias=False)
        )

    def forward(self, views):
        """Takes two views in one batch: DDP prepares one backward pass for each forward pass."""
        return self.layers(views.flatten(0, 1)).unflatten(0, (2, -1))


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = Projector()
x = torch.randn(2, 1, BATCH_SIZE, 12)
views = x + 0.5 * torch.randn(2, 2, BATCH_SIZE, 12)
if WORLD > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
with harness.training(model, optimizer):
    for step in range(2):
        optimizer.zero_grad()
        barlow_loss(*model(views[step, :, RANK::WORLD])).backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
