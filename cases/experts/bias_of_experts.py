"""Experts with a bias are split over ranks by their hidden units, and weighted by a router.

id = "experts/bias_of_experts"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/torchtitan#4245", "NVIDIA-NeMo/Automodel#2591"]
date = "2026-06"
tags = ["experts", "sgd"]

[wrong.each_rank_adds_whole_bias]
title = "each rank adds the whole bias"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["1"] }

[wrong.bias_is_not_weighted_by_router]
title = "the bias is not weighted by the router"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["1"] }
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
EXPERTS, WIDTH, HIDDEN, BATCH_SIZE = 4, 7, 12, 18


class Enter(torch.autograd.Function):
    """Each rank computes with the whole; its gradients of the parts are added."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if WORLD > 1:
            dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    """Adds the parts."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def own(weight, dim):
    return nn.Parameter(weight.chunk(WORLD, dim)[RANK].clone())


class GroupedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = own(torch.randn(EXPERTS, WIDTH, HIDDEN) / 2, 2)
        self.down = own(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3, 1)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 2)

    def forward(self, x):
        scores = self.router(x)
        is_chosen = scores >= scores.topk(2, -1).values[:, 1:]
        gates = scores.masked_fill(~is_chosen, -torch.inf).softmax(-1)
        hidden = F.relu(torch.einsum("bd,edh->ebh", Enter.apply(x), self.up))
        y = torch.bmm(hidden, self.down)  # The part of the own hidden units.
        bias = self.bias[:, None]
        if BUG == "each_rank_adds_whole_bias":
            y = Leave.apply(y + bias)
        elif BUG == "bias_is_not_weighted_by_router":
            y = Leave.apply(y)
            return x + torch.einsum("ebd,be->bd", y, gates) + is_chosen.float() @ self.bias
        else:
            y = Leave.apply(y) + bias
        return x + torch.einsum("ebd,be->bd", y, gates)


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        dims = {"*.up": "e d h[tp]", "*.down": "e h[tp] d"}
        layout = {"mesh": mesh, "dims": {"inputs": "b d", **dims}}
    torch.manual_seed(49)
    model = nn.Sequential(nn.Linear(5, WIDTH), GroupedExperts(), nn.Linear(WIDTH, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, 5, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            F.multi_margin_loss(model(x), x[:, :3].argmax(1), p=2).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
