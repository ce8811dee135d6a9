"""Soft experts get mixtures of tokens: each rank computes some experts for the slots of all.

id = "experts/soft_slots"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["lucidrains/soft-moe-pytorch#4"]
date = "2023-12"
tags = ["experts", "gathered", "sgd"]

[wrong.gathered_rows_have_own_gradient]
title = "gathered rows have the own gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = [
    "soft.experts.*",
    "soft.slots",
    "into.*",
] }

[wrong.gradients_of_experts_are_not_reduced]
title = "gradients of experts are not reduced"
place = { node = "sum", step = 0, ranks = "all", tensors = ["soft.experts.*"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXPERTS, SLOTS, WIDTH, LENGTH, BATCH_SIZE = 2, 2, 8, 5, 8


class Gather(torch.autograd.Function):
    """Puts the rows of all ranks together along an axis."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if BUG != "gathered_rows_have_own_gradient":
            dist.all_reduce(gradient)
        return gradient.chunk(WORLD, ctx.dim)[RANK], None


class SoftExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.slots = nn.Parameter(torch.randn(EXPERTS, SLOTS, WIDTH) / 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.Mish(), nn.Linear(12, WIDTH))
            for _ in range(EXPERTS)
        )

    def compute(self, mixed):
        """Takes and returns (batch, experts, slots, width)."""
        if WORLD > 1:
            mixed = Gather.apply(mixed, 0)
        own = range(RANK * EXPERTS // WORLD, (RANK + 1) * EXPERTS // WORLD)
        y = torch.stack([self.experts[number](mixed[:, number]) for number in own], 1)
        return Gather.apply(y, 1).chunk(WORLD)[RANK] if WORLD > 1 else y

    def forward(self, x):
        scores = torch.einsum("bnd,esd->bnes", x, self.slots)
        y = self.compute(torch.einsum("bnd,bnes->besd", x, scores.softmax(1)))
        weights = scores.flatten(2).softmax(-1).view_as(scores)
        return x + torch.einsum("besd,bnes->bnd", y, weights)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.soft = nn.Linear(6, WIDTH), SoftExperts()
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.out(self.soft(torch.tanh(self.into(x))).amax(1))


def reduce_gradients(model):
    for name, weight in model.named_parameters():
        if BUG == "gradients_of_experts_are_not_reduced" and "experts" in name:
            continue
        if weight.grad is None:  # Of an expert of another rank.
            weight.grad = torch.zeros_like(weight)
        dist.all_reduce(weight.grad)
        weight.grad /= WORLD


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(51)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.8)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH_SIZE, LENGTH, 6, generator=generator).chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.cross_entropy(model(x), x.mean(1)[:, :3].argmax(1)).backward()
            if WORLD > 1:
                reduce_gradients(model)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
