"""Ranks of one tensor-parallel group must drop the same inputs of a LoRA adapter.

id = "adapters/lora_dropout"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["tenstorrent/tt-metal#55947"]
date = "2026-09"
tags = ["tensor_parallel", "dropout", "lora", "sgd"]

[wrong.each_rank_draws_its_own_mask]
title = "each rank draws its own mask"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.mask_is_same_in_each_step]
title = "the mask is the same in each step"
place = { node = "random", step = 1, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Adapted(nn.Module):
    """A column-parallel base; A and B of the adapter are parallel in their hidden features."""

    def __init__(self, width=10, hidden=16, rank=4):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.base.requires_grad_(False)
        self.dropout = nn.Dropout(0.4)
        self.lora_a = nn.Linear(width, rank, bias=False)
        self.lora_b = nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return self.base(x) + 2.0 * self.lora_b(self.lora_a(self.dropout(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(2))
        self.score = nn.Linear(10, 3)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.score(x)


def parallelize(model):
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    plan = {
        "base.0": ColwiseParallel(),
        "base.2": RowwiseParallel(),
        "lora_a": ColwiseParallel(),
        "lora_b": RowwiseParallel(),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    if WORLD > 1:
        parallelize(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.3, momentum=0.9)
    inputs = torch.randn(3, 24, 10, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(100 + RANK if BUG == "each_rank_draws_its_own_mask" else 100)
    with harness.training(model, optimizer):
        for x in inputs:
            if BUG == "mask_is_same_in_each_step":
                torch.manual_seed(100)
            loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
