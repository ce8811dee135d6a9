"""Hooks reduce a gradient when its first part is ready; the encoder is used twice.

id = "random/reused_encoder"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["deepspeedai/DeepSpeed#8224"]
date = "2026-08"
tags = ["accumulation", "recomputation", "sgd"]

[wrong.second_part_is_not_sent]
title = "the second part is not sent"
place = { node = "sum", step = 0, ranks = "all", tensors = ["encoder.*"] }

[wrong.second_part_is_dropped]
title = "the second part is dropped"
place = { node = "sum", step = 0, ranks = "all", tensors = ["encoder.*"] }

[wrong.parts_are_summed_over_ranks_not_averaged]
title = "the parts are summed over the ranks, not averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Siamese(nn.Module):
    """Encodes two inputs in two subgraphs, so that each weight gets its gradient in two parts."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x, other):
        x, other = x.requires_grad_(), other.requires_grad_()
        first = checkpoint(self.encoder, x, use_reentrant=True)
        second = checkpoint(self.encoder, other, use_reentrant=True)
        return self.head(first), first - second


class Reducer:
    def __init__(self, model):
        self.weights = list(model.parameters())
        self.sent = {}
        for weight in self.weights:
            weight.register_post_accumulate_grad_hook(self.when_ready)

    def when_ready(self, weight):
        if WORLD == 1 or not BUG:
            return
        if BUG == "parts_are_summed_over_ranks_not_averaged":
            own = weight.grad - self.sent.get(weight, 0)
            dist.all_reduce(own)
            self.sent[weight] = self.sent.get(weight, 0) + own
            weight.grad = self.sent[weight].clone()
        elif weight not in self.sent:
            dist.all_reduce(weight.grad)
            weight.grad /= WORLD
            self.sent[weight] = weight.grad.clone()
        elif BUG == "second_part_is_dropped":
            weight.grad.copy_(self.sent[weight])

    def finish(self):
        self.sent.clear()
        for weight in self.weights if WORLD > 1 and not BUG else ():
            dist.all_reduce(weight.grad)
            weight.grad /= WORLD


torch.manual_seed(0)
if WORLD > 1:
    dist.init_process_group("gloo")
model = Siamese()
reducer = Reducer(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with harness.training(model, optimizer):
    for step in range(2):
        x, other = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step))
        y = x[:, :3].argmax(dim=1)
        logits, difference = model(x[RANK::WORLD], other[RANK::WORLD])
        loss = nn.functional.cross_entropy(logits, y[RANK::WORLD]) + difference.square().mean()
        optimizer.zero_grad()
        loss.backward()
        reducer.finish()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
