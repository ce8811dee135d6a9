"""Gradients of replicated weights enter the norm once per rank of tensor parallelism.

id = "sharded/tp_grad_norm"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA-NeMo/RL#3788", "ROCm/TransformerEngine#715"]
date = "2026-08"
tags = ["tensor_parallel", "sgd"]

[wrong.copies_count_once_per_rank]
title = "copies count once per rank"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.norms_of_parts_are_added_not_their_squares]
title = "the norms of parts are added, not their squares"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from cases import harness

BUG = os.environ.get("BUG", "")
WORLD = int(os.environ.get("WORLD_SIZE", 1))
PLAN = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
MAX_NORM = 0.2


class GatedBlock(nn.Module):
    def __init__(self, width=12, hidden=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 12)
        self.block = GatedBlock()
        self.head = nn.Linear(12, 1)

    def forward(self, x):
        return self.head(self.block(self.stem(x))).squeeze(1)


def grad_norm(parameters):
    squares = {"parts": torch.zeros(()), "copies": torch.zeros(())}
    for p in parameters:
        is_part = isinstance(p.grad, DTensor)
        own = p.grad.to_local() if is_part else p.grad
        squares["parts" if is_part else "copies"] += own.square().sum()
    if WORLD > 1:
        if BUG == "copies_count_once_per_rank":
            dist.all_reduce(squares["copies"])
        if BUG == "norms_of_parts_are_added_not_their_squares":
            norm = squares["parts"].sqrt()
            dist.all_reduce(norm)
            return norm + squares["copies"].sqrt()
        dist.all_reduce(squares["parts"])
    return (squares["parts"] + squares["copies"]).sqrt()


def train(model, optimizer):
    generator = torch.Generator().manual_seed(7)
    for _ in range(2):
        x = torch.randn(32, 5, generator=generator)
        loss = nn.functional.mse_loss(model(x), x.prod(1) + 1)
        optimizer.zero_grad()
        loss.backward()
        factor = float((MAX_NORM / (grad_norm(model.parameters()) + 1e-6)).clamp(max=1.0))
        for p in model.parameters():
            p.grad.mul_(factor)
        optimizer.step()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Regressor()
    if WORLD > 1:
        parallelize_module(model.block, init_device_mesh("cpu", (WORLD,)), PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.8)
    with harness.training(model, optimizer):
        train(model, optimizer)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
