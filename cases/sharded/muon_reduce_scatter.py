"""With reduce-scatter, a matrix that crosses two partitions is orthogonalised half reduced.

id = "sharded/muon_reduce_scatter"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["deepspeedai/DeepSpeed#7807", "deepspeedai/DeepSpeed#8090"]
date = "2026-01"
tags = ["gathered", "muon"]

[wrong.only_own_slice_is_reduced]
title = "only the own slice is reduced"
place = { node = "sum", step = 0, ranks = "all", tensors = ["0.weight"] }

[wrong.each_slice_is_orthogonalised_as_rows]
title = "each slice is orthogonalised as rows"
place = { node = "update", step = 0, ranks = "all", tensors = ["0.weight"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def newton_schulz(g):
    g = g / (g.norm() + 1e-12)
    for _ in range(5):
        g = 1.5 * g - 0.5 * (g @ g.T) @ g
    return g


class ZeroMuon(torch.optim.Optimizer):
    """Each rank updates one slice of the flattened weights, and gathers the others."""

    def __init__(self, params, lr=0.02, beta=0.95):
        super().__init__(params, {"lr": lr, "beta": beta})
        self.weights = self.param_groups[0]["params"]
        total = sum(p.numel() for p in self.weights)
        assert total % WORLD == 0
        self.begin, self.end = RANK * total // WORLD, (RANK + 1) * total // WORLD

    def reduce(self, flat):
        if WORLD == 1:
            return flat
        average = flat.clone()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        if BUG == "only_own_slice_is_reduced":
            flat[self.begin : self.end] = average[self.begin : self.end]
            return flat
        return average

    def updates(self, flat):
        """Yields the update of each weight that has elements in the own slice."""
        lr, beta = self.param_groups[0]["lr"], self.param_groups[0]["beta"]
        start = 0
        for p in self.weights:
            stop = start + p.numel()
            first, last = max(start, self.begin), min(stop, self.end)
            if first < last:
                gradient = flat[start:stop].view_as(p)
                if p.ndim == 2:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(gradient, 1 - beta)
                    gradient = newton_schulz(self.matrix(momentum, first - start, last - start))
                yield first, last, lr * gradient.flatten()[first - start : last - start]
            start = stop

    def matrix(self, momentum, first, last):
        if BUG != "each_slice_is_orthogonalised_as_rows":
            return momentum
        own = torch.zeros_like(momentum).flatten()
        own[first:last] = momentum.flatten()[first:last]
        return own.view_as(momentum)

    @torch.no_grad()
    def step(self, closure=None):
        flat = self.reduce(torch.cat([p.grad.flatten() for p in self.weights]))
        values = torch.cat([p.flatten() for p in self.weights])
        for first, last, update in self.updates(flat):
            values[first:last] -= update
        if WORLD > 1:
            slices = [torch.empty(self.end - self.begin) for _ in range(WORLD)]
            dist.all_gather(slices, values[self.begin : self.end].clone())
            values = torch.cat(slices)
        for p in self.weights:
            p.copy_(values[: p.numel()].view_as(p))
            values = values[p.numel() :]


if __name__ == "__main__":
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 10), nn.GELU(), nn.Linear(10, 4))
    optimizer = ZeroMuon(model.parameters())
    x = torch.randn(2, 48, 12)
    y = torch.randint(4, (2, 48))
    with harness.training(model, optimizer):
        for step in range(2):
            optimizer.zero_grad()
            logits = model(x[step, RANK::WORLD])
            nn.functional.cross_entropy(logits, y[step, RANK::WORLD]).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()
