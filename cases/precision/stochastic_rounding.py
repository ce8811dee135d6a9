"""Each rank rounds the updated bfloat16 weights with random numbers of its own.

id = "precision/stochastic_rounding"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["Nerogar/OneTrainer#804", "karpathy/llm.c#597", "Koratahiu/Advanced_Optimizers#7"]
date = "2025-04"
tags = ["low_precision"]

[wrong.seed_depends_on_rank]
title = "the seed depends on the rank"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.each_step_rounds_with_same_numbers]
title = "each step rounds with the same numbers"
place = { node = "random", step = 1, ranks = "all", tensors = "all" }

[wrong.weights_are_rounded_to_nearest]
title = "weights are rounded to nearest"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class StochasticSGD(torch.optim.Optimizer):
    """Weights have values of bfloat16, and are rounded up or down at random."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        rank = RANK if BUG == "seed_depends_on_rank" else 0
        self.generator = torch.Generator().manual_seed(100 + rank)

    @torch.no_grad()
    def step(self):
        if BUG == "each_step_rounds_with_same_numbers":
            self.generator.manual_seed(100)
        for group in self.param_groups:
            for weight in group["params"]:
                updated = weight - group["lr"] * weight.grad
                bits = updated.view(torch.int32)
                noise = torch.randint(1 << 16, bits.shape, generator=self.generator)
                if BUG == "weights_are_rounded_to_nearest":
                    noise.fill_(1 << 15)
                bits = (bits + noise.int()) & -65536  # Drops the lower 16 bits.
                weight.copy_(bits.view(torch.float32))


torch.manual_seed(0)
if WORLD > 1:
    dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
for weight in model.parameters():
    weight.data = weight.data.bfloat16().float()
optimizer = StochasticSGD(model.parameters(), lr=0.01)
with harness.training(model, optimizer):
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        y = x.sum(dim=1).gt(0).long()
        loss = nn.functional.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD])
        model.zero_grad()
        loss.backward()
        for weight in model.parameters() if WORLD > 1 else ():
            dist.all_reduce(weight.grad)
            weight.grad /= WORLD
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
