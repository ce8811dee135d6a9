"""A recomputed block gets its saved input from other ranks than those that split it.

id = "parallel/finding_04_recomputation_group"
framework = "torch"
processes = 4
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#7452"]
date = "2026-09"
tags = ["gathered", "embedding", "sgd"]

[wrong.split_and_gathered_over_default_ranks]
title = "split and gathered over default ranks"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["block.*", "trunk.*", "tokens.*"] }

[wrong.gathered_over_default_ranks]
title = "gathered over default ranks"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["block.*", "trunk.*", "tokens.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
TP = 2 if WORLD > 1 else 1
VOCABULARY, WIDTH = 12, 16
groups = {}  # Name → group, and the rank within it.


def add(x, name):
    x = x.clone()
    if WORLD > 1:
        dist.all_reduce(x, group=groups[name][0])
    return x


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return add(gradient, "tp")


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return add(x, "tp")

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Recompute(torch.autograd.Function):
    """Keeps of the input of a block only a part on each rank of tensor parallelism."""

    @staticmethod
    def forward(ctx, block, x):
        name = "default" if BUG == "split_and_gathered_over_default_ranks" else "tp"
        rank = groups[name][1] if WORLD > 1 else 0
        ctx.own_name = name
        ctx.block, ctx.part = block, x.detach().chunk(TP, 1)[rank].contiguous()
        with torch.no_grad():
            return block.compute(x)

    @staticmethod
    def backward(ctx, gradient):
        name = (
            "default" if ctx.own_name == "default" or BUG == "gathered_over_default_ranks" else "tp"
        )
        parts = [torch.empty_like(ctx.part) for _ in range(TP)]
        if WORLD > 1:
            dist.all_gather(parts, ctx.part, group=groups[name][0])
        x = (torch.cat(parts, 1) if WORLD > 1 else ctx.part).requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block.compute(x), gradient)
        return None, x.grad


class FurtherBlock(nn.Module):
    def __init__(self):
        super().__init__()
        rank = groups["tp"][1] if WORLD > 1 else 0
        up, down = torch.randn(2 * WIDTH, WIDTH) / 4, torch.randn(WIDTH, 2 * WIDTH) / 4
        self.up = nn.Parameter(up.chunk(TP)[rank].clone())
        self.down = nn.Parameter(down.chunk(TP, 1)[rank].clone())

    def compute(self, x):
        return x + Reduce.apply(F.linear(F.gelu(F.linear(Copy.apply(x), self.up)), self.down))

    def forward(self, x):
        return Recompute.apply(self, x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.trunk = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block, self.head = FurtherBlock(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = torch.tanh(self.trunk(self.tokens(tokens)))
        return self.head(x), self.head(self.block(x))


def main():
    layout, dp_rank, dp_size = {}, 0, 1
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
        dp_rank, dp_size = mesh["dp"].get_local_rank(), 2
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        groups["default"] = pairs[RANK // 2], RANK % 2
        groups["tp"] = mesh["tp"].get_group(), mesh["tp"].get_local_rank()
        groups["dp"] = mesh["dp"].get_group(), dp_rank
        dims = {"inputs": "b[dp] s", "block.up": "o[tp] i", "block.down": "o i[tp]"}
        layout = {"mesh": mesh, "dims": dims}
    torch.manual_seed(4)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(VOCABULARY, (8, 6), generator=generator).chunk(dp_size)[dp_rank]
            one, two = model(text[:, :-2])
            loss = F.cross_entropy(one.flatten(0, 1), text[:, 1:-1].flatten())
            loss = loss + F.cross_entropy(two.flatten(0, 1), text[:, 2:].flatten())
            optimizer.zero_grad()
            loss.backward()
            if WORLD > 1:
                for p in model.parameters():
                    p.grad = add(p.grad, "dp") / dp_size
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
