"""Ranks skip different layers in a step.

id = "random/stochastic_depth"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["mosaicml/composer#296", "pytorch/vision#7722", "facebookresearch/fairseq2#484"]
date = "2022-01"
tags = ["sgd"]

[wrong.each_rank_chooses_layers_itself]
title = "each rank chooses the layers itself"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.rank_0_has_drawn_number_more]
title = "rank 0 has drawn a number more"
place = { node = "random", step = 0, ranks = [0], tensors = "all" }

[wrong.kept_layers_are_not_scaled]
title = "the kept layers are not scaled"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

SURVIVAL = 0.5


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return torch.relu(self.conv(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3)
        self.layers = nn.ModuleList(Residual(6) for _ in range(4))
        self.head = nn.Linear(6, 4)
        seed = 20 + RANK if BUG == "each_rank_chooses_layers_itself" else 20
        self.generator = torch.Generator().manual_seed(seed)
        if BUG == "rank_0_has_drawn_number_more" and RANK == 0:
            torch.rand(1, generator=self.generator)

    def forward(self, x):
        x = self.stem(x)
        scale = 1 if BUG == "kept_layers_are_not_scaled" else 1 / SURVIVAL
        for layer in self.layers:
            if torch.rand(1, generator=self.generator) < SURVIVAL:
                x = x + scale * layer(x)
        return self.head(x.mean(dim=(2, 3)))


def average_gradients(model):
    for weight in model.parameters():
        if weight.grad is None:  # Of a layer that was skipped.
            weight.grad = torch.zeros_like(weight)
        if WORLD > 1:
            dist.all_reduce(weight.grad)
            weight.grad /= WORLD


torch.manual_seed(0)
if WORLD > 1:
    dist.init_process_group("gloo")
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
with harness.training(model, optimizer):
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 1, 8, 8, generator=generator)
        y = torch.randint(4, (8,), generator=generator)
        loss = nn.functional.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD])
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
