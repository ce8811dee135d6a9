"""Weights are pruned by masks that are partly drawn at random, on each rank.

id = "random/masks_of_weights"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["neuralmagic/sparseml#429"]
date = "2021-10"
tags = ["ddp", "sgd"]

[wrong.each_rank_draws_its_own_masks]
title = "each rank draws its own masks"
place = { node = "random", step = 0, ranks = [1], tensors = ["*.mask"] }

[wrong.masks_of_each_step_are_same]
title = "the masks of each step are the same"
place = { node = "random", step = 1, ranks = "all", tensors = ["*.mask"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
KEPT = 0.7


class PrunedLinear(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("mask", torch.ones(outputs, inputs))

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


class Pruner:
    """Chooses the weights of each layer anew before each step."""

    def __init__(self, model):
        self.layers = [layer for layer in model if isinstance(layer, PrunedLinear)]
        seed = 30 + RANK if BUG == "each_rank_draws_its_own_masks" else 30
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self):
        if BUG == "masks_of_each_step_are_same":
            self.generator.manual_seed(30)
        for layer in self.layers:
            drawn = torch.rand(layer.mask.shape, generator=self.generator)
            layer.mask.copy_(drawn < KEPT)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(PrunedLinear(8, 16), nn.ReLU(), PrunedLinear(16, 4))
    pruner = Pruner(model)
    wrapped = DistributedDataParallel(model, broadcast_buffers=False) if WORLD > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with harness.training(wrapped, optimizer):
        for step in range(3):
            x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))[RANK::WORLD]
            pruner.draw()
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), x[:, :4].argmax(1)).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
