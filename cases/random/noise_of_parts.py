"""Ranks with parts of one sequence must noise it to the same time, with parts of the same noise.

id = "random/noise_of_parts"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["PKU-YuanGroup/Open-Sora-Plan#366", "ByteDance-Seed/VeOmni#56"]
date = "2024-07"
tags = ["ddp", "gathered", "sgd"]

[wrong.each_rank_draws_its_own_times]
title = "each rank draws its own times"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.all_parts_have_noise_of_first]
title = "all parts have the noise of the first"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VIDEOS, LENGTH, SIZE, WIDTH = 6, 8, 4, 12


class Gather(torch.autograd.Function):
    """Joins the parts of all ranks, whose gradients are added."""

    @staticmethod
    def forward(ctx, x):
        if WORLD == 1:
            return x.view_as(x)
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if WORLD > 1:
            dist.all_reduce(gradient)
        return gradient.chunk(WORLD, 1)[RANK]


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.time = nn.Linear(SIZE, WIDTH), nn.Linear(1, WIDTH)
        self.mix, self.leave = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, SIZE)

    def forward(self, x, times):
        x = self.enter(x) + self.time(times[:, None])[:, None]
        queries, keys, values = self.mix(F.silu(x)).chunk(3, -1)
        keys, values = Gather.apply(keys), Gather.apply(values)
        return self.leave(x + F.scaled_dot_product_attention(queries, keys, values))


def draw(generator):
    """Returns noise for whole videos, and a time for each."""
    noise = torch.randn(VIDEOS, LENGTH, SIZE, generator=generator)
    times = torch.rand(VIDEOS, generator=generator)
    return noise, times


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("sp",))
        layout = {"mesh": mesh, "dims": "b s[sp]"}
    torch.manual_seed(3)
    model = Denoiser()
    if WORLD > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, nesterov=True)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            video = torch.randn(VIDEOS, LENGTH, SIZE, generator=generator).cumsum(1) / 2
            noise, times = draw(torch.Generator().manual_seed(100 + step))
            if BUG == "each_rank_draws_its_own_times":
                times = draw(torch.Generator().manual_seed(100 + step + 10 * RANK))[1]
            elif BUG == "all_parts_have_noise_of_first":
                noise = noise.chunk(WORLD, 1)[0].repeat(1, WORLD, 1)
            video, noise = (whole.chunk(WORLD, 1)[RANK] for whole in (video, noise))
            mixed = torch.lerp(video, noise, times[:, None, None])
            F.mse_loss(model(mixed, times), noise - video).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
