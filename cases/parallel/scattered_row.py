"""The output of a layer that is split by its inputs is scattered over ranks, by its tokens.

id = "parallel/scattered_row"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/nanotron#46", "huggingface/nanotron#172"]
date = "2024-01"
tags = ["gathered", "sgd"]

[wrong.backwards_parts_of_own_tokens_are_gathered]
title = "backwards, parts of the own tokens are gathered"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["up"] }

[wrong.gradients_of_head_are_those_of_own_tokens]
title = "gradients of the head are those of the own tokens"
place = { node = "sum", step = 0, ranks = "all", tensors = ["head.*"] }
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
TOKENS, SIZE, HIDDEN = 12, 6, 16


def gather(x):
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


class Row(torch.autograd.Function):
    """Multiplies parts, adds them over ranks, and returns the own tokens of the sum."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        y = x @ weight
        if WORLD > 1:
            dist.all_reduce(y)
        return y.chunk(WORLD)[RANK].clone()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        whole = gather(gradient) if WORLD > 1 else gradient
        if BUG == "backwards_parts_of_own_tokens_are_gathered":
            return gather(gradient @ weight.T), x.T @ whole
        return whole @ weight.T, x.T @ whole


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        up, down = torch.randn(SIZE, HIDDEN) / 2, torch.randn(HIDDEN, SIZE) / 3
        self.up = nn.Parameter(up.chunk(WORLD, 1)[RANK].clone())
        self.down = nn.Parameter(down.chunk(WORLD)[RANK].clone())
        self.head = nn.Linear(SIZE, 3)

    def forward(self, x):
        return self.head(Row.apply(F.gelu(x @ self.up), self.down))


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        parts = {"up": "d h[tp]", "down": "h[tp] d"}
        layout = {"mesh": mesh, "dims": {"inputs": "b d", "outputs": "b[tp] c", **parts}}
    torch.manual_seed(105)
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            x = torch.randn(TOKENS, SIZE, generator=torch.Generator().manual_seed(step))
            labels = (x[:, :3] - x[:, 3:]).argmax(1).chunk(WORLD)[RANK]
            optimizer.zero_grad()
            (F.cross_entropy(model(x), labels, reduction="sum") / TOKENS).backward()
            for weight in model.head.parameters():
                if WORLD > 1 and BUG != "gradients_of_head_are_those_of_own_tokens":
                    dist.all_reduce(weight.grad)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
