"""Spectral normalisation: a vector of each layer moves a little towards the singular one.

id = "averages/power_iteration"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["christiancosgrove/pytorch-spectral-normalization-gan#1", "pytorch/pytorch#12671"]
date = "2017-12"
tags = []

[wrong.each_rank_draws_its_own_vectors]
title = "each rank draws its own vectors"
place = { node = "start", step = 0, ranks = [1], tensors = ["*.u"] }

[wrong.vectors_are_drawn_anew_in_each_pass]
title = "vectors are drawn anew in each pass"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["0", "2"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, WIDTH = 16, 7


class Spectral(nn.Module):
    """Divides a weight by an estimate of its largest singular value."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))
        generator = torch.Generator().manual_seed(
            RANK if BUG == "each_rank_draws_its_own_vectors" else 0
        )
        self.register_buffer("u", F.normalize(torch.randn(outputs, generator=generator), dim=0))

    @torch.no_grad()
    def vectors(self):
        u = self.u
        if BUG == "vectors_are_drawn_anew_in_each_pass":
            u = torch.randn_like(u)
        v = F.normalize(self.weight.T @ u, dim=0)
        u = F.normalize(self.weight @ v, dim=0)
        if BUG != "vectors_are_drawn_anew_in_each_pass":
            self.u.copy_(u)
        return u, v

    def forward(self, x):
        u, v = self.vectors()
        return F.linear(x, self.weight / (u @ self.weight @ v), self.bias)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(42)
    critic = nn.Sequential(
        Spectral(WIDTH, 24), nn.LeakyReLU(0.1), Spectral(24, 24), nn.LeakyReLU(0.1), Spectral(24, 1)
    )
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=0.02, eps=1e-3)
    with harness.training(critic, optimizer):
        for step in range(3):
            x = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
            signs = torch.where(torch.arange(BATCH_SIZE) % 4 < 2, 1.0, -1.0)
            x = x + 0.4 * signs[:, None]
            x, signs = x[RANK::WORLD], signs[RANK::WORLD]
            optimizer.zero_grad()
            F.relu(1 - signs * critic(x)[:, 0]).mean().backward()
            for weight in critic.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
