"""Queries and keys are normalised over all heads at once, of which each rank has some.

id = "parallel/norm_of_all_heads"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["EleutherAI/gpt-neox#1424", "vllm-project/vllm#35932", "turboderp-org/exllamav3#141"]
date = "2026-01"
tags = ["tensor", "sgd"]

[wrong.rank_normalises_its_heads]
title = "a rank normalises its heads by themselves"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.sum_of_squares_has_no_gradient]
title = "the sum of squares has no gradient of other ranks"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["queries", "keys"] }

[wrong.heads_are_normalised_one_by_one]
title = "heads are normalised one by one"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_reduce

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, LENGTH, SIZE, WIDTH, HEADS = 4, 5, 6, 16, 4


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Attention(nn.Module):
    """Each rank has some of the heads, as columns of three matrices and rows of the last."""

    def __init__(self):
        super().__init__()
        drawn = [torch.randn(SIZE, WIDTH) / 2 for _ in range(3)]
        parts = [nn.Parameter(each.chunk(WORLD, 1)[RANK].clone()) for each in drawn]
        self.queries, self.keys, self.values = parts
        self.out = nn.Parameter((torch.randn(WIDTH, SIZE) / 4).chunk(WORLD)[RANK].clone())

    def norm(self, x):
        """Divides by the root of the mean square over all heads; x is [batch, length, part]."""
        if BUG == "heads_are_normalised_one_by_one":
            x = x.unflatten(-1, (-1, WIDTH // HEADS))
            return (x * x.square().mean(-1, keepdim=True).rsqrt()).flatten(-2)
        squares, width = x.square().sum(-1, keepdim=True), x.shape[-1]
        if WORLD > 1 and BUG != "rank_normalises_its_heads":
            if BUG == "sum_of_squares_has_no_gradient":
                squares = Sum.apply(squares)
            else:
                squares = all_reduce(squares)
            width = WIDTH
        return x * (squares / width + 1e-6).rsqrt()

    def heads(self, x):
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

    def forward(self, x):
        queries, keys = self.norm(x @ self.queries), self.norm(x @ self.keys)
        parts = self.heads(queries), self.heads(keys), self.heads(x @ self.values)
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        y = y.transpose(1, 2).flatten(-2) @ self.out
        return Sum.apply(y) if WORLD > 1 else y


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        parts = {**dict.fromkeys(("queries", "keys", "values"), "d h[tp]"), "out": "h[tp] d"}
        layout = {"mesh": mesh, "dims": {"inputs": "b l d", "outputs": "b l d", **parts}}
    torch.manual_seed(218)
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH_SIZE, LENGTH, SIZE, generator=generator)
            optimizer.zero_grad()
            F.mse_loss(model(x), x.cumsum(1).tanh()).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
