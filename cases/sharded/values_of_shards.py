"""Values of sharded gradients are clipped one by one, for which no rank has to know of another.

id = "sharded/values_of_shards"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["meta-pytorch/torchrec#4388"]
date = "2026-06"
tags = ["fsdp2", "sgd"]

[wrong.largest_value_is_divided_by_ranks]
title = "the largest value is divided by the ranks"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.shard_is_scaled_by_its_largest_value]
title = "a shard is scaled by its largest value"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }
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
BATCH_SIZE, LARGEST = 16, 0.03


@torch.no_grad()
def clip(weights):
    largest = LARGEST / WORLD if BUG == "largest_value_is_divided_by_ranks" else LARGEST
    for weight in weights:
        grad = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
        if BUG == "shard_is_scaled_by_its_largest_value" and WORLD > 1:
            grad *= (largest / grad.abs().max()).clamp(max=1)
        else:
            grad.clamp_(-largest, largest)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(203)
    model = nn.Sequential(nn.Linear(6, 20), nn.SELU(), nn.Linear(20, 20), nn.SELU())
    model.append(nn.Linear(20, 2))
    if WORLD > 1:
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in model[::2]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, 6, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.l1_loss(model(x), x[:, :2] * x[:, 2:4]).backward()
            clip(model.parameters())
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
