"""Each rank has a part of every sequence, and rotates queries and keys by the places in the whole.

id = "parallel/rotary_of_parts"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#560"]
date = "2023-10"
tags = ["ddp", "gathered", "embedding", "adam"]

[wrong.places_are_counted_in_part]
title = "places are counted in the part"
place = { node = "outputs", step = 0, ranks = [1], tensors = ["attention"] }

[wrong.causal_mask_counts_places_in_part]
title = "the causal mask counts places in the part"
place = { node = "outputs", step = 0, ranks = [1], tensors = ["attention"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORDS, WIDTH, HEADS, LENGTH = 14, 16, 2, 12


def rotate(x, places):
    """Rotates pairs of elements; x has the shape (batch, heads, places, size)."""
    half = x.shape[-1] // 2
    angles = places[:, None] * 10.0 ** -torch.arange(half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Gather(torch.autograd.Function):
    """Joins the parts of all ranks, whose gradients are added."""

    @staticmethod
    def forward(ctx, x):
        if WORLD == 1:
            return x.view_as(x)
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if WORLD > 1:
            dist.all_reduce(gradient)
        return gradient.chunk(WORLD, 2)[RANK]


def gather(x):
    return Gather.apply(x.contiguous())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        own, whole = torch.arange(x.shape[1]), torch.arange(LENGTH)
        places = own if BUG == "places_are_counted_in_part" else own + RANK * len(own)
        rows = own if BUG == "causal_mask_counts_places_in_part" else own + RANK * len(own)
        parts = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        queries, keys = rotate(parts[0], places), gather(rotate(parts[1], places))
        mask = rows[:, None] >= whole
        y = F.scaled_dot_product_attention(queries, keys, gather(parts[2]), attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Embedding(WORDS, WIDTH), Attention()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.attention(x))


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
        layout = {"mesh": mesh, "dims": "b s[cp]"}
    torch.manual_seed(21)
    model = Model()
    if WORLD > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(WORDS, (6, LENGTH + 1), generator=generator)
            tokens, targets = (part.chunk(WORLD, 1)[RANK] for part in (text[:, :-1], text[:, 1:]))
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
