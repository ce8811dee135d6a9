"""PowerSGD without its error feedback, or with other start matrices on each rank.

id = "precision/power_sgd"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["pytorch/pytorch#48670", "pytorch/pytorch#47202", "arXiv 1905.13727"]
date = "2020-12"
tags = ["sgd"]

[wrong.error_is_not_fed_back]
title = "the error is not fed back"
place = { node = "sum", step = 1, ranks = "all", tensors = ["0.weight", "2.weight"] }

[wrong.each_rank_starts_from_its_own_matrix]
title = "each rank starts from its own matrix"
place = { node = "sum", step = 0, ranks = "all", tensors = ["0.weight", "2.weight"] }

[wrong.second_factor_is_not_all_reduced]
title = "the second factor is not all-reduced"
place = { node = "sum", step = 0, ranks = "all", tensors = ["0.weight", "2.weight"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def all_reduce_mean(tensor):
    if WORLD > 1:
        dist.all_reduce(tensor)
        tensor /= WORLD
    return tensor


class PowerSGD:
    """Sends two factors of rank 2 in place of each matrix."""

    def __init__(self, weights):
        self.weights = list(weights)
        own = RANK if BUG == "each_rank_starts_from_its_own_matrix" else 0
        generator = torch.Generator().manual_seed(7 + own)
        self.q = {
            w: torch.randn(w.shape[1], 2, generator=generator) for w in self.weights if w.dim() == 2
        }
        self.errors = {w: torch.zeros_like(w) for w in self.q}

    def reduce(self):
        for weight in self.weights:
            if weight.dim() == 2:
                weight.grad = self._compressed(weight)
            else:
                all_reduce_mean(weight.grad)

    def _compressed(self, weight):
        matrix = weight.grad + self.errors[weight]
        p = torch.linalg.qr(all_reduce_mean(matrix @ self.q[weight]))[0]
        q = matrix.T @ p
        if BUG != "second_factor_is_not_all_reduced":
            q = all_reduce_mean(q)
        self.q[weight] = q
        if BUG != "error_is_not_fed_back":
            self.errors[weight] = matrix - p @ q.T
        return p @ q.T


torch.manual_seed(0)
if WORLD > 1:
    dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(10, 14), nn.ReLU(), nn.Linear(14, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compressor = PowerSGD(model.parameters())
with harness.training(model, optimizer):
    for step in range(3):
        x = torch.randn(16, 10, generator=torch.Generator().manual_seed(step))
        y = x[:, :8].argmax(dim=1)
        loss = nn.functional.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD])
        optimizer.zero_grad()
        loss.backward()
        compressor.reduce()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
