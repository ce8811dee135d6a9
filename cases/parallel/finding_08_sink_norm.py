"""Attention sinks are split over ranks, but the norm for clipping counts those of rank 0 only.

id = "parallel/finding_08_sink_norm"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#7452", "NVIDIA/Megatron-LM#7530"]
date = "2026-09"
tags = ["clipping", "sgd"]

[wrong.sinks_of_one_rank_are_counted]
title = "sinks of one rank are counted"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.norm_of_own_parts]
title = "norm of the own parts"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }
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
WIDTH, HEADS, CLASSES, MAX_NORM = 16, 4, 4, 0.1
PARTS = {"q": "o[tp] i", "k": "o[tp] i", "v": "o[tp] i", "sinks": "h[tp]", "out": "o i[tp]"}


def add(x):
    x = x.clone(memory_format=torch.contiguous_format)
    if WORLD > 1:
        dist.all_reduce(x)
    return x


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return add(gradient)


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return add(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class SinkAttention(nn.Module):
    """Each head has a learned score that takes a share of the attention."""

    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v"):
            part = (torch.randn(WIDTH, WIDTH) / 4).chunk(WORLD)[RANK]
            self.register_parameter(name, nn.Parameter(part.clone()))
        part = (torch.randn(WIDTH, WIDTH) / 4).chunk(WORLD, 1)[RANK]
        self.out = nn.Parameter(part.clone())
        self.sinks = nn.Parameter(torch.zeros(HEADS).chunk(WORLD)[RANK].clone())

    def forward(self, x):
        x = Enter.apply(x)
        q, k, v = (
            F.linear(x, w).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(2, 3) / 2
        sinks = (30 * self.sinks).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], 3).softmax(3)[..., :-1]
        return Leave.apply(F.linear((weights @ v).transpose(1, 2).flatten(2), self.out))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.attention = nn.Linear(6, WIDTH), SinkAttention()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.inputs(x)
        return self.head((x + self.attention(x)).mean(1))


def clip(model):
    split, copies = torch.zeros(()), torch.zeros(())
    for name, p in model.named_parameters():
        square = p.grad.square().sum()
        if name == "attention.sinks" and BUG == "sinks_of_one_rank_are_counted":
            split += square * (RANK == 0)  # As a copy of which that of rank 0 counts.
        elif name.startswith("attention."):
            split += square
        else:
            copies += square
    norm = (copies + (split if BUG == "norm_of_own_parts" else add(split))).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)


layout = {}
if WORLD > 1:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    dims = {"inputs": "b s f", **{f"attention.{name}": text for name, text in PARTS.items()}}
    layout = {"mesh": mesh, "dims": dims}
torch.manual_seed(10)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
with harness.training(model, optimizer, **layout):
    for _ in range(2):
        x, y = torch.randn(8, 5, 6) * 2, torch.randint(CLASSES, (8,))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        clip(model)
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
