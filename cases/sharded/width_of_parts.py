"""Rates and outputs are scaled by the width of a layer, whose weights are split over ranks.

id = "sharded/width_of_parts"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["microsoft/mup#59"]
date = "2023-09"
tags = ["tensor", "adam"]

[wrong.rate_follows_width_of_part]
title = "the rate follows the width of a part"
place = { node = "update", step = 0, ranks = "all", tensors = ["down"] }

[wrong.outputs_are_scaled_by_width_of_part]
title = "outputs are scaled by the width of a part"
place = { node = "outputs", step = 0, ranks = "all", tensors = [""] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE, HIDDEN, BASE, RATE = 12, 6, 24, 8, 0.02


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Mlp(nn.Module):
    """Its hidden layer is split; each rank has a part of the columns and rows."""

    def __init__(self):
        super().__init__()
        up, down = torch.randn(SIZE, HIDDEN) / 2, torch.randn(HIDDEN, SIZE) / 4
        self.up = nn.Parameter(up.chunk(WORLD, 1)[RANK].clone())
        self.down = nn.Parameter(down.chunk(WORLD)[RANK].clone())
        self.bias = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x):
        width = HIDDEN
        if BUG == "outputs_are_scaled_by_width_of_part":
            width = len(self.down)
        y = F.silu(x @ self.up) @ self.down * (BASE / width) ** 0.5
        return (Sum.apply(y) if WORLD > 1 else y) + self.bias


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        parts = {"up": "d h[tp]", "down": "h[tp] d"}
        layout = {"mesh": mesh, "dims": {"inputs": "b d", "outputs": "b d", **parts}}
    torch.manual_seed(202)
    model = Mlp()
    width = len(model.down) * WORLD
    if BUG == "rate_follows_width_of_part":
        width = len(model.down)
    scaled = {"params": [model.down], "lr": RATE * BASE / width}
    groups = [{"params": [model.up, model.bias]}, scaled]
    optimizer = torch.optim.Adam(groups, lr=RATE, eps=1e-3)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, SIZE, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            F.mse_loss(model(x), x.roll(1, 1).sin()).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
