"""Heads of attention are split over ranks, and each head has its own slope of distances.

id = "parallel/slopes_of_heads"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["bigscience-workshop/Megatron-DeepSpeed#227", "flashinfer-ai/flashinfer#1606"]
date = "2022-01"
tags = ["embedding", "sgd"]

[wrong.each_rank_has_slopes_of_first_heads]
title = "each rank has the slopes of the first heads"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["attention"] }

[wrong.slopes_are_those_of_model_with_own_heads]
title = "slopes are those of a model with the own heads only"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["attention"] }
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
WORDS, WIDTH, HEADS, LENGTH, BATCH_SIZE = 14, 12, 4, 7, 6
OWN = HEADS // WORLD


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


def slopes(heads):
    """Returns 2^(-8 / heads), 2^(-16 / heads), …"""
    return 2 ** (-8 * torch.arange(1, heads + 1) / heads)


def own_slopes():
    if BUG == "slopes_are_those_of_model_with_own_heads":
        return slopes(OWN)
    if BUG == "each_rank_has_slopes_of_first_heads":
        return slopes(HEADS)[:OWN]
    return slopes(HEADS)[RANK * OWN : (RANK + 1) * OWN]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        weights = torch.randn(4, WIDTH, WIDTH) / 2
        parts = [each.chunk(WORLD)[RANK] for each in weights[:3]]
        self.queries, self.keys, self.values = (nn.Parameter(part.clone()) for part in parts)
        self.out = nn.Parameter(weights[3].chunk(WORLD, 1)[RANK].clone())

    def forward(self, x):
        x = Enter.apply(x)
        queries, keys, values = (
            F.linear(x, each).unflatten(-1, (OWN, -1)).transpose(1, 2)
            for each in (self.queries, self.keys, self.values)
        )
        places = torch.arange(LENGTH)
        distances = (places[:, None] - places).float()
        bias = -own_slopes()[:, None, None] * distances
        bias = bias.masked_fill(distances < 0, -torch.inf)
        y = F.scaled_dot_product_attention(queries, keys, values, bias)
        return Leave.apply(F.linear(y.transpose(1, 2).flatten(2), self.out))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Embedding(WORDS, WIDTH), Attention()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(x + self.attention(x)))


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        dims = dict.fromkeys(("*.queries", "*.keys", "*.values"), "h[tp] d")
        layout = {"mesh": mesh, "dims": {"inputs": "b s", "*.out": "d h[tp]", **dims}}
    torch.manual_seed(59)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(WORDS, (BATCH_SIZE, LENGTH + 1), generator=generator)
            optimizer.zero_grad()
            logits = model(text[:, :-1]).flatten(0, 1)
            F.cross_entropy(logits, text[:, 1:].flatten()).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
