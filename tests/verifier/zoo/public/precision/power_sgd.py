"""PowerSGD without its error feedback, or with other start matrices on each rank.

reference = "pytorch/pytorch#48670, pytorch/pytorch#47202, arXiv 1905.13727"
date = "2020-12"
framework = "torch"
steps = 3
note = "The reference compresses too; no detail names an error that is not fed back."

[wrong]
"the error is not fed back" = ["lost_error_feedback", "sparsified"]
"each rank starts from its own matrix" = ["other_random_numbers", "not_all_reduced"]
"the second factor is not all-reduced" = ["partial_not_reduced", "not_all_reduced"]
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import lockstep

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
        own = RANK if BUG == "each rank starts from its own matrix" else 0
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
        if BUG != "the second factor is not all-reduced":
            q = all_reduce_mean(q)
        self.q[weight] = q
        if BUG != "the error is not fed back":
            self.errors[weight] = matrix - p @ q.T
        return p @ q.T


torch.manual_seed(0)
if WORLD > 1:
    dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(10, 14), nn.ReLU(), nn.Linear(14, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compressor = PowerSGD(model.parameters())
with lockstep.record(model, optimizer):
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
