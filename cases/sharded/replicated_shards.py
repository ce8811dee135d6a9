"""Shards are replicated, and their gradients are all-reduced in the last micro-batch only.

id = "sharded/replicated_shards"
framework = "torch"
processes = 4
steps = 2
mode = "pair"
references = ["pytorch/torchtitan#1929", "NVIDIA/cosmos-framework#161"]
date = "2025-10"
tags = ["fsdp2", "accumulation", "sgd"]

[wrong.all_reduce_is_off_in_last_micro_batch]
title = "the all-reduce is off in the last micro-batch"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.mesh_has_no_axis_of_replicas]
title = "the mesh has no axis of replicas"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.all_reduce_is_off_by_one_micro_batch]
title = "the all-reduce is off by one micro-batch"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
MICRO_BATCHES, BATCH_SIZE = 2, 16


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.head(x)


def shard(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    if BUG == "mesh_has_no_axis_of_replicas":
        mesh = mesh["dp_shard"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def backward(model, x, number):
    is_last = number == MICRO_BATCHES - 1
    if BUG == "all_reduce_is_off_by_one_micro_batch":
        is_last = number == MICRO_BATCHES - 2
    if WORLD > 1 and BUG != "mesh_has_no_axis_of_replicas":
        model.set_requires_all_reduce(is_last and BUG != "all_reduce_is_off_in_last_micro_batch")
    loss = F.cross_entropy(model(x), x[:, :4].argmax(1)) / MICRO_BATCHES
    loss.backward()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(2)
    model = Net()
    if WORLD > 1:
        shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            for number, micro_batch in enumerate(x[RANK::WORLD].chunk(MICRO_BATCHES)):
                backward(model, micro_batch, number)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
