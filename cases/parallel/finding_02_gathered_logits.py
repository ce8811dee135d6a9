"""Logits that were gathered already enter a cross-entropy for a split vocabulary.

id = "parallel/finding_02_gathered_logits"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#7452"]
date = "2026-09"
tags = ["recurrent", "gathered", "embedding", "sgd"]

[wrong.gathered_logits_in_parallel_loss]
title = "gathered logits in the parallel loss"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.gradients_of_equal_logits_are_added]
title = "gradients of equal logits are added"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }
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
VOCABULARY, WIDTH = 20, 16


def add(x, op=dist.ReduceOp.SUM):
    x = x.clone(memory_format=torch.contiguous_format)
    if WORLD > 1:
        dist.all_reduce(x, op)
    return x


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return add(gradient)


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return add(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Gather(torch.autograd.Function):
    """Each rank then computes the same with all logits: its part of their gradient is right."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        if WORLD == 1:
            return x.view_as(x)
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        if BUG == "gradients_of_equal_logits_are_added":
            gradient = add(gradient)
        return gradient.chunk(WORLD, -1)[RANK]


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        weight = torch.randn(VOCABULARY, WIDTH) / 4
        self.output = nn.Parameter(weight.chunk(WORLD)[RANK].clone())

    def forward(self, tokens):
        hidden, _ = self.rnn(self.embed(tokens))
        return Gather.apply(F.linear(Copy.apply(hidden), self.output))


def vocabulary_parallel_loss(logits, targets):
    """Expects the logits of the own part of the vocabulary."""
    size = logits.shape[-1]
    logits = logits - add(logits.detach().amax(-1), dist.ReduceOp.MAX).unsqueeze(-1)
    own = targets - RANK * size
    inside = (own >= 0) & (own < size)
    picked = logits.gather(-1, own.clamp(0, size - 1).unsqueeze(-1)).squeeze(-1)
    total = Reduce.apply(logits.exp().sum(-1))
    return (total.log() - Reduce.apply(picked * inside)).mean()


def compute_loss(logits, targets):
    if BUG == "gathered_logits_in_parallel_loss":
        return vocabulary_parallel_loss(logits, targets)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


layout = {}
if WORLD > 1:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    layout = {"mesh": mesh, "dims": {"inputs": "b s", "output": "v[tp] d"}}
torch.manual_seed(1)
model = LanguageModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
generator = torch.Generator().manual_seed(2)
with harness.training(model, optimizer, **layout):
    for _ in range(2):
        text = torch.randint(VOCABULARY, (4, 8), generator=generator)
        loss = compute_loss(model(text[:, :-1]), text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
