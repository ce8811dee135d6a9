"""A critic says how much more real a picture is than the mean of all others, on any rank.

id = "gathered/more_real_than_mean"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["eriklindernoren/PyTorch-GAN#52", "eriklindernoren/PyTorch-GAN#93"]
date = "2019-05"
tags = ["gan", "sgd"]

[wrong.means_are_those_of_rank]
title = "means are those of a rank"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.means_have_no_gradient]
title = "means have no gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE = 12, 8


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


def mean_of(logits):
    mean = logits.mean()
    if WORLD > 1 and BUG != "means_are_those_of_rank":
        mean = all_reduce(mean) / WORLD
    return mean.detach() if BUG == "means_have_no_gradient" else mean


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(215)
    critic = nn.Sequential(nn.Linear(SIZE, 20), nn.LeakyReLU(0.2), nn.Linear(20, 1, bias=False))
    generator = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, SIZE))
    generator.requires_grad_(False)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.3, momentum=0.5)
    with harness.training(critic, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, SIZE + 4, generator=torch.Generator().manual_seed(step))
            x = (x + torch.linspace(-1, 1, BATCH_SIZE)[:, None]).chunk(WORLD)[RANK]
            logits = critic(torch.cat([x[:, :SIZE], generator(x[:, SIZE:])]))[:, 0]
            real, fake = logits.chunk(2)
            loss = F.softplus(mean_of(fake) - real).mean() + F.softplus(fake - mean_of(real)).mean()
            optimizer.zero_grad()
            loss.backward()
            average([weight.grad for weight in critic.parameters()])
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
