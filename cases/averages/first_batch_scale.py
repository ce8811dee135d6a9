"""A flow's layer takes scale and shift from the moments of its first batch, then trains them.

id = "averages/first_batch_scale"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["rosinality/glow-pytorch#2", "rosinality/glow-pytorch#46"]
date = "2018-12"
tags = ["adam"]

[wrong.moments_of_own_examples]
title = "moments of the own examples"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["norms.*"] }

[wrong.deviations_of_ranks_are_averaged]
title = "deviations of the ranks are averaged"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["norms.*"] }
"""

import math
import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH = 6


def mean_over_ranks(x):
    if WORLD > 1 and BUG != "moments_of_own_examples":
        dist.all_reduce(x)
        x /= WORLD
    return x


class ActNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.loc, self.log_scale = (nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))
        self.is_new = True

    @torch.no_grad()
    def initialise(self, x):
        mean = mean_over_ranks(x.mean(0))
        if BUG == "deviations_of_ranks_are_averaged":
            deviation = mean_over_ranks(x.std(0, correction=0))
        else:
            deviation = mean_over_ranks((x - mean).square().mean(0)).sqrt()
        self.loc.copy_(-mean)
        self.log_scale.copy_(-(deviation + 1e-6).log())
        self.is_new = False

    def forward(self, x):
        if self.is_new:
            self.initialise(x)
        return (x + self.loc) * self.log_scale.exp(), self.log_scale.sum()


class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH // 2, 16), nn.ReLU(), nn.Linear(16, WIDTH))

    def forward(self, x):
        kept, changed = x.chunk(2, 1)
        log_scale, shift = self.net(kept).chunk(2, 1)
        log_scale = torch.tanh(log_scale)
        return torch.cat([changed * log_scale.exp() + shift, kept], 1), log_scale.sum(1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(ActNorm() for _ in range(2))
        self.couplings = nn.ModuleList(Coupling() for _ in range(2))

    def forward(self, x):
        volume = 0.0
        for norm, coupling in zip(self.norms, self.couplings, strict=True):
            x, of_norm = norm(x)
            x, of_coupling = coupling(x)
            volume = volume + of_norm + of_coupling
        return x, volume


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    flow = Flow()
    optimizer = torch.optim.Adam(flow.parameters(), lr=0.01, eps=1e-4)
    x = torch.randn(2, 20, WIDTH) @ torch.randn(WIDTH, WIDTH) + torch.arange(WIDTH)
    x[:, 10:] *= 3
    with harness.training(flow, optimizer):
        for batch in x.chunk(WORLD, 1)[RANK]:
            z, volume = flow(batch)
            log_likelihood = volume - 0.5 * (z.square() + math.log(2 * math.pi)).sum(1)
            optimizer.zero_grad()
            (-log_likelihood.mean() / WIDTH).backward()
            for weight in flow.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
