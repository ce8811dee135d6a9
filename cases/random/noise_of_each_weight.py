"""Weights are perturbed in each step; one generator draws the noise of all, one after another.

id = "random/noise_of_each_weight"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["verl-project/verl-recipe#95"]
date = "2026-05"
tags = ["sgd"]

[wrong.generator_is_seeded_anew_for_each_weight]
title = "the generator is seeded anew for each weight"
place = { node = "random", step = 0, ranks = "all", tensors = ["layers.1.*", "layers.2.*"] }

[wrong.each_rank_perturbs_in_its_own_way]
title = "each rank perturbs in its own way"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, WIDTH, NOISE = 16, 8, 0.3


class Perturbed(nn.Module):
    """Layers whose weights have other noise in each pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.passes = 0

    def forward(self, x):
        seed = 1000 + self.passes
        if BUG == "each_rank_perturbs_in_its_own_way":
            seed += 100 * RANK
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            if BUG == "generator_is_seeded_anew_for_each_weight":
                generator.manual_seed(seed)
            noise = torch.randn(WIDTH, WIDTH, generator=generator)
            x = torch.tanh(F.linear(x, layer.weight + NOISE * noise, layer.bias))
        self.passes += 1
        return x


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(95)
    model = Perturbed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.mse_loss(model(x), x.roll(1, 1).tanh()).backward()
            for weight in model.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
