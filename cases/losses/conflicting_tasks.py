"""Two tasks pull at the same weights, and the gradient of each loses what harms the other.

id = "losses/conflicting_tasks"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["median-research-group/LibMTL#16", "WeiChengTseng/Pytorch-PCGrad#5"]
date = "2020-11"
tags = ["sgd"]

[wrong.gradients_of_rank_are_projected]
title = "gradients of a rank are projected"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.each_weight_is_projected_by_itself]
title = "each weight is projected by itself"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.second_gradient_is_projected_on_what_is_left_of_first]
title = "the second gradient is projected on what is left of the first"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE = 16, 6


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


def without_conflict(one, other):
    """Returns a gradient without its part against another one; both are lists of arrays."""
    dot = sum((a * b).sum() for a, b in zip(one, other, strict=True))
    factor = dot.clamp(max=0) / sum(b.square().sum() for b in other)
    return [a - factor * b for a, b in zip(one, other, strict=True)]


def combine(first, second):
    if BUG == "each_weight_is_projected_by_itself":
        pairs = list(zip(first, second, strict=True))
        return [(without_conflict([a], [b])[0] + without_conflict([b], [a])[0]) for a, b in pairs]
    projected = without_conflict(first, second)
    if BUG == "second_gradient_is_projected_on_what_is_left_of_first":
        first = projected
    other = without_conflict(second, first)
    return [a + b for a, b in zip(projected, other, strict=True)]


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(212)
    model = nn.Sequential(nn.Linear(SIZE, 16), nn.Tanh(), nn.Linear(16, 1))
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.2, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, SIZE, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            outputs = model(x)[:, 0]
            one = F.mse_loss(outputs, x[:, 0] + x[:, 1])
            other = F.l1_loss(outputs, 1 - x[:, 0] + x[:, 2])
            optimizer.zero_grad()
            first = list(torch.autograd.grad(one, weights, retain_graph=True))
            second = list(torch.autograd.grad(other, weights))
            if BUG == "gradients_of_rank_are_projected":
                grads = combine(first, second)
                average(grads)
            else:
                average(first + second)
                grads = combine(first, second)
            for weight, grad in zip(weights, grads, strict=True):
                weight.grad = grad
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
