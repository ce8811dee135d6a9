"""Ranks change between parts of sequences and parts of heads, beside an axis of examples.

id = "parallel/heads_and_sequences"
framework = "torch"
processes = 4
steps = 2
mode = "pair"
references = ["ByteDance-Seed/VeOmni#1115"]
date = "2026-08"
tags = ["ddp", "embedding", "sgd"]

[wrong.gradients_are_averaged_over_axis_of_examples]
title = "gradients are averaged over the axis of examples only"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.loss_is_divided_by_parts_of_sequence_too]
title = "the loss is divided by the parts of a sequence, too"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.heads_come_back_in_reverse_order]
title = "heads come back in reverse order"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["attention"] }
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
PARTS = 2 if WORLD > 1 else 1
WORDS, WIDTH, HEADS, LENGTH, BATCH_SIZE = 13, 16, 4, 8, 8


class Exchange(torch.autograd.Function):
    """Sends part i of the first axis to rank i of a group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.contiguous()
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x, group=group)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, ctx.group), None


class Attention(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def exchange(self, x):
        return x if self.group is None else Exchange.apply(x, self.group)

    def to_heads(self, x):
        """Takes (batch, part, heads, size); returns (batch, part of heads, sequence, size)."""
        x = self.exchange(x.unflatten(2, (PARTS, -1)).movedim(2, 0))
        return x.movedim(0, 1).flatten(1, 2).transpose(1, 2)

    def to_sequence(self, y):
        y = self.exchange(y.transpose(1, 2).unflatten(1, (PARTS, -1)).movedim(1, 0))
        if BUG == "heads_come_back_in_reverse_order":
            y = y.flip(0)
        return y.movedim(0, 2).flatten(2)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        queries, keys, values = (self.to_heads(part) for part in qkv)
        y = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(self.to_sequence(y))


class Model(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.embed, self.attention = nn.Embedding(WORDS, WIDTH), Attention(group)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.attention(x))


def main():
    layout, group = {}, None
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
        layout, group = {"mesh": mesh, "dims": "b[dp] s[sp]"}, mesh.get_group("sp")
    torch.manual_seed(8)
    model = Model(group)
    if WORLD > 1:
        is_short = BUG == "gradients_are_averaged_over_axis_of_examples"
        reducing = mesh.get_group("dp") if is_short else None
        model = DistributedDataParallel(model, process_group=reducing)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(WORDS, (BATCH_SIZE, LENGTH + 1), generator=generator)
            text = text.chunk(WORLD // PARTS)[RANK // PARTS]
            tokens, targets = (
                part.chunk(PARTS, 1)[RANK % PARTS] for part in (text[:, :-1], text[:, 1:])
            )
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            if BUG == "loss_is_divided_by_parts_of_sequence_too":
                loss = loss / PARTS
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
