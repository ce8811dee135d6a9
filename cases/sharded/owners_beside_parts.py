"""Weights have owners among the ranks with the same part of the model, not among all ranks.

id = "sharded/owners_beside_parts"
framework = "torch"
processes = 4
steps = 2
mode = "pair"
references = ["facebookresearch/fairscale#115", "facebookresearch/fairscale#121"]
date = "2020-09"
tags = ["sgd"]

[wrong.gradients_are_averaged_over_all_ranks]
title = "gradients are averaged over all ranks"
place = { node = "sum", step = 0, ranks = "all", tensors = ["*.inner", "*.outer"] }

[wrong.owners_are_counted_over_all_ranks]
title = "owners are counted over all ranks"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PARTS = 2 if WORLD > 1 else 1
COPIES = WORLD // PARTS
COPY, PART = RANK // PARTS, RANK % PARTS
WIDTH, HIDDEN, CLASSES, BATCH_SIZE = 8, 16, 4, 16


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if WORLD > 1:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class FeedForward(nn.Module):
    """Its hidden units are split over the ranks of a group."""

    def __init__(self, group):
        super().__init__()
        self.group, self.norm = group, nn.LayerNorm(WIDTH)
        inner, outer = torch.randn(HIDDEN, WIDTH) / 3, torch.randn(WIDTH, HIDDEN) / 4
        self.inner = nn.Parameter(inner.chunk(PARTS)[PART].clone())
        self.outer = nn.Parameter(outer.chunk(PARTS, 1)[PART].clone())

    def forward(self, x):
        y = Enter.apply(self.norm(x), self.group)
        y = F.relu6(y @ self.inner.T) @ self.outer.T
        return x + Leave.apply(y, self.group)


class Sharded:
    """Momentum of each weight is kept by one of the ranks, which sends the new weight."""

    def __init__(self, model, group):
        self.weights, self.group = list(model.parameters()), group
        number = WORLD if BUG == "owners_are_counted_over_all_ranks" else COPIES
        self.rank = RANK if BUG == "owners_are_counted_over_all_ranks" else COPY
        self.owners = [place % number for place in range(len(self.weights))]
        own = [w for w, owner in zip(self.weights, self.owners, strict=True) if owner == self.rank]
        self.optimizer = torch.optim.SGD(own, lr=0.2, momentum=0.9)

    @torch.no_grad()
    def step(self):
        everything = BUG == "gradients_are_averaged_over_all_ranks"
        for weight in self.weights:
            if WORLD > 1:
                dist.all_reduce(weight.grad, group=None if everything else self.group)
                weight.grad /= WORLD if everything else COPIES
        self.optimizer.step()
        for weight, owner in zip(self.weights, self.owners, strict=True):
            if WORLD > 1:
                source = owner % COPIES * PARTS + PART
                dist.broadcast(weight, source, group=self.group)


def main():
    layout, parts, copies = {}, None, None
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (COPIES, PARTS), mesh_dim_names=("dp", "tp"))
        parts, copies = mesh.get_group("tp"), mesh.get_group("dp")
        dims = {"*.inner": "h[tp] d", "*.outer": "d h[tp]"}
        layout = {"mesh": mesh, "dims": {"inputs": "b[dp] d", **dims}}
    torch.manual_seed(25)
    layers = [nn.Linear(6, WIDTH), FeedForward(parts), FeedForward(parts)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    sharded = Sharded(model, copies)
    with harness.training(model, sharded.optimizer, **layout):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, 6, generator=torch.Generator().manual_seed(step))
            x = x.chunk(COPIES)[COPY]
            model.zero_grad()
            F.nll_loss(F.log_softmax(model(x), 1), x[:, :CLASSES].argmax(1)).backward()
            sharded.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
