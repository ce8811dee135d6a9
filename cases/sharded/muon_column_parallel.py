"""Muon under tensor parallelism orthogonalises each rank's rows, so that the update depends on tp.

id = "sharded/muon_column_parallel"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["deepspeedai/DeepSpeed#8437"]
date = "2026-09"
tags = ["tensor_parallel", "adam", "muon"]

[wrong.each_part_is_orthogonalised_on_its_own]
title = "each part is orthogonalised on its own"
place = { node = "update", step = 0, ranks = "all", tensors = ["up.weight", "down.weight"] }

[wrong.scale_is_that_of_shape_of_part]
title = "the scale is that of the shape of a part"
place = { node = "update", step = 0, ranks = "all", tensors = ["up.weight"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from cases import harness

BUG = os.environ.get("BUG", "")
WORLD = int(os.environ.get("WORLD_SIZE", 1))


def orthogonalise(matrix, steps=6):
    """Newton-Schulz iterations of third order."""
    x = matrix / matrix.norm()
    for _ in range(steps):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


def scale_of(matrix):
    return max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                p.sub_(self.direction(buffer) * group["lr"])

    def direction(self, buffer):
        if not isinstance(buffer, DTensor):
            return orthogonalise(buffer) * scale_of(buffer)
        mesh, placements, part = buffer.device_mesh, buffer.placements, buffer.to_local()
        if BUG == "each_part_is_orthogonalised_on_its_own":
            update = orthogonalise(part) * scale_of(buffer)
            return DTensor.from_local(update, mesh, placements)
        whole = buffer.full_tensor()
        scale = scale_of(whole)
        if BUG == "scale_is_that_of_shape_of_part":
            scale = scale_of(part)
        return distribute_tensor(orthogonalise(whole) * scale, mesh, placements)


class Block(nn.Module):
    def __init__(self, width=8, hidden=24):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Block()
    if WORLD > 1:
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    muon = Muon([model.up.weight, model.down.weight])
    adam = torch.optim.AdamW(model.norm.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    with harness.training(model, [muon, adam]):
        for _ in range(2):
            x, y = torch.randn(2, 64, 8, generator=generator)
            loss = nn.functional.mse_loss(model(x), y.roll(1, 1))
            loss.backward()
            for optimizer in (muon, adam):
                optimizer.step()
                optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
