"""Sinkhorn's iterations spread a batch over prototypes, and must see the batch of all ranks.

id = "gathered/sinkhorn_codes"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["facebookresearch/capi#12", "facebookresearch/dinov2#360", "vturrisi/solo-learn#249"]
date = "2025-04"
tags = ["ddp", "sgd"]

[wrong.codes_of_own_batch]
title = "codes of the own batch"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.prototypes_are_normalised_on_rank_0_only]
title = "prototypes are normalised on rank 0 only"
place = { node = "between", step = 0, ranks = [1], tensors = ["prototypes.weight"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PROTOTYPES, WIDTH, TEMPERATURE, SHARPNESS = 6, 8, 0.2, 0.1


class SwAV(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv1d(2, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(40, WIDTH)
        )
        self.prototypes = nn.Linear(WIDTH, PROTOTYPES, bias=False)

    def forward(self, views):
        return self.prototypes(F.normalize(self.backbone(views), dim=1))


def sum_over_ranks(x):
    if WORLD > 1 and BUG != "codes_of_own_batch":
        dist.all_reduce(x)
    return x


@torch.no_grad()
def codes_of(scores):
    """Returns for each example a distribution over prototypes, all of which are used equally."""
    codes = (scores / SHARPNESS).exp()
    codes /= sum_over_ranks(codes.sum())
    for _ in range(3):
        codes /= sum_over_ranks(codes.sum(0)) * PROTOTYPES
        codes /= codes.sum(1, keepdim=True)
    return codes


@torch.no_grad()
def normalise(prototypes):
    if BUG != "prototypes_are_normalised_on_rank_0_only" or RANK == 0:
        prototypes.copy_(F.normalize(prototypes, dim=1))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = SwAV()
    prototypes = model.prototypes.weight
    normalise(prototypes)
    x = torch.randn(2, 12, 2, 12)
    views = torch.stack([x, x + 0.3 * torch.randn_like(x)], 1)
    if WORLD > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with harness.training(model, optimizer):
        for batch in views[:, :, RANK::WORLD]:
            first, second = model(batch.flatten(0, 1)).chunk(2)
            loss = F.cross_entropy(first / TEMPERATURE, codes_of(second))
            loss = loss + F.cross_entropy(second / TEMPERATURE, codes_of(first))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            normalise(prototypes)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
