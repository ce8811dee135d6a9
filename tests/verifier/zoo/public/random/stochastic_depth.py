"""Ranks skip different layers in a step.

reference = "mosaicml/composer#296, pytorch/vision#7722, facebookresearch/fairseq2#484"
date = "2022-01"
framework = "torch"
steps = 3

[wrong]
"each rank chooses the layers itself" = ["other_random_numbers", "other_outputs"]
"rank 0 has drawn a number more" = ["other_random_numbers", "other_outputs"]
"the kept layers are not scaled" = ["other_outputs"]
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import lockstep

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
        seed = 20 + RANK if BUG == "each rank chooses the layers itself" else 20
        self.generator = torch.Generator().manual_seed(seed)
        if BUG == "rank 0 has drawn a number more" and RANK == 0:
            torch.rand(1, generator=self.generator)

    def forward(self, x):
        x = self.stem(x)
        scale = 1 if BUG == "the kept layers are not scaled" else 1 / SURVIVAL
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
with lockstep.record(model, optimizer):
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
