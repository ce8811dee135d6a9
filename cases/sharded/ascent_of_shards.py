"""Sharpness-aware minimisation climbs first, by a step whose length needs the norm of all shards.

id = "sharded/ascent_of_shards"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["davda54/sam#18", "facebookresearch/fairscale#989"]
date = "2021-03"
tags = ["fsdp2", "sgd"]

[wrong.norm_is_that_of_own_shards]
title = "the norm is that of the own shards"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.gradient_of_ascent_is_not_cleared]
title = "the gradient of the ascent is not cleared"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
RADIUS = 0.4


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def climb(weights):
    """Moves the weights up the gradient, and returns by how much."""
    square = torch.stack([local(weight.grad).square().sum() for weight in weights]).sum()
    if WORLD > 1 and BUG != "norm_is_that_of_own_shards":
        dist.all_reduce(square)
    moves = [local(weight.grad) * (RADIUS / (square.sqrt() + 1e-6)) for weight in weights]
    for weight, move in zip(weights, moves, strict=True):
        local(weight).add_(move)
    return moves


@torch.no_grad()
def return_from(weights, moves):
    for weight, move in zip(weights, moves, strict=True):
        local(weight).sub_(move)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(65)
    model = nn.Sequential(
        nn.Conv1d(2, 6, 3), nn.SiLU(), nn.Flatten(), nn.Linear(36, 12), nn.SiLU(), nn.Linear(12, 4)
    )
    if WORLD > 1:
        mesh = init_device_mesh("cpu", (WORLD,))
        fully_shard(model[3], mesh=mesh)
        fully_shard(model, mesh=mesh)
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.2, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(20, 2, 8, generator=torch.Generator().manual_seed(step))[RANK::WORLD]
            labels = x[:, 0, :4].argmax(1)
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels, label_smoothing=0.1).backward()
            moves = climb(weights)
            if BUG != "gradient_of_ascent_is_not_cleared":
                optimizer.zero_grad()
            F.cross_entropy(model(x), labels, label_smoothing=0.1).backward()
            return_from(weights, moves)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
