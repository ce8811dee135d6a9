"""Ranks of one tensor-parallel group must drop the same inputs of a LoRA adapter.

reference = "tenstorrent/tt-metal#55947"
date = "2026-09"
framework = "torch"
steps = 3

[wrong]
"each rank draws its own mask" = ["other_random_numbers"]
"the mask is the same in each step" = ["random_numbers_repeated"]
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lockstep

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
    torch.manual_seed(100 + RANK if BUG == "each rank draws its own mask" else 100)
    with lockstep.record(model, optimizer):
        for x in inputs:
            if BUG == "the mask is the same in each step":
                torch.manual_seed(100)
            loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
