"""All ranks have the bias of a layer that is split by its inputs, and the sum must have it once.

id = "parallel/shared_bias"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/torchtitan#4332", "GeeeekExplorer/nano-vllm#99"]
date = "2025-08"
tags = ["sgd"]

[wrong.gradient_of_bias_is_divided_by_ranks]
title = "the gradient of the bias is divided by the ranks"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["1.down.bias", "2.down.bias"] }

[wrong.only_rank_0_adds_bias_and_has_its_gradient]
title = "only rank 0 adds the bias, and has its gradient"
place = { node = "gradient", step = 0, ranks = [1], tensors = ["1.down.bias", "2.down.bias"] }
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
WIDTH, HIDDEN = 9, 16


class Enter(torch.autograd.Function):
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
    return nn.Parameter(weight.detach().chunk(WORLD, dim)[RANK].clone())


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.up.weight, self.up.bias = own(self.up.weight, 0), own(self.up.bias, 0)
        self.down.weight = own(self.down.weight, 1)
        nn.init.normal_(self.down.bias, std=0.3)

    def part_of_bias(self):
        bias = self.down.bias
        if BUG == "only_rank_0_adds_bias_and_has_its_gradient":
            return bias if RANK == 0 else torch.zeros_like(bias)
        if BUG == "gradient_of_bias_is_divided_by_ranks":
            return bias / WORLD
        return bias + (bias / WORLD - bias).detach()

    def forward(self, x):
        hidden = F.hardtanh(self.up(Enter.apply(x)))
        return x + Leave.apply(F.linear(hidden, self.down.weight) + self.part_of_bias())


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        dims = {"*.up.weight": "h[tp] d", "*.up.bias": "h[tp]", "*.down.weight": "d h[tp]"}
        layout = {"mesh": mesh, "dims": {"inputs": "b d", **dims}}
    torch.manual_seed(29)
    model = nn.Sequential(nn.Linear(5, WIDTH), FeedForward(), FeedForward(), nn.Linear(WIDTH, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            x = torch.randn(18, 5, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            F.smooth_l1_loss(model(x), torch.stack([x.sum(1), x.prod(1)], 1)).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
