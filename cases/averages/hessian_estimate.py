"""Sophia averages an estimate of the Hessian, which each rank makes from its own examples.

id = "averages/hessian_estimate"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["google-deepmind/optax#979", "Liuhong99/Sophia#27"]
date = "2023-06"
tags = []

[wrong.estimate_is_that_of_own_examples]
title = "the estimate is that of the own examples"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }

[wrong.estimate_has_batch_size_of_rank]
title = "the estimate has the batch size of a rank"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }

[wrong.squares_are_averaged_over_ranks]
title = "squares are averaged over the ranks"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, CLASSES = 16, 4


class Sophia(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, betas=(0.8, 0.7), rho=0.02):
        super().__init__(params, {"lr": lr, "betas": betas, "rho": rho})

    @torch.no_grad()
    def update_hessian(self, estimates):
        group = self.param_groups[0]
        for weight, estimate in zip(group["params"], estimates, strict=True):
            hessian = self.state[weight].setdefault("hessian", torch.zeros_like(weight))
            hessian.lerp_(estimate, 1 - group["betas"][1])

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        for weight in group["params"]:
            state = self.state[weight]
            average = state.setdefault("exp_avg", torch.zeros_like(weight))
            average.lerp_(weight.grad, 1 - group["betas"][0])
            bound = group["rho"] * BATCH_SIZE * state["hessian"] + 0.02
            weight -= group["lr"] * (average / bound).clamp(-1, 1)


def mean_over_ranks(x):
    if WORLD > 1:
        dist.all_reduce(x)
        x /= WORLD
    return x


def estimate_hessian(model, x, uniform):
    """Squares the gradient of a loss whose labels are drawn from the model."""
    logits = model(x)
    chances = logits.detach().softmax(1).cumsum(1)
    labels = (uniform[:, None] > chances).sum(1).clamp(max=CLASSES - 1)
    gradients = torch.autograd.grad(F.cross_entropy(logits, labels), list(model.parameters()))
    size = len(x) if BUG == "estimate_has_batch_size_of_rank" else BATCH_SIZE
    if BUG == "squares_are_averaged_over_ranks":
        return [size * mean_over_ranks(g * g) for g in gradients]
    if BUG == "estimate_is_that_of_own_examples":
        return [size * g * g for g in gradients]
    return [size * mean_over_ranks(g).square() for g in gradients]


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 14), nn.Tanh(), nn.Linear(14, CLASSES))
    optimizer = Sophia(model.parameters())
    with harness.training(model, optimizer):
        for _ in range(3):
            x, uniform = torch.randn(BATCH_SIZE, 6), torch.rand(BATCH_SIZE)
            x, uniform = x[RANK::WORLD], uniform[RANK::WORLD]
            F.cross_entropy(model(x), x[:, :CLASSES].argmax(1)).backward()
            for weight in model.parameters():
                mean_over_ranks(weight.grad)
            optimizer.update_hessian(estimate_hessian(model, x, uniform))
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


main()
