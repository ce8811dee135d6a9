"""An engine that accumulates gradients keeps one micro-batch of a step, or reduces too early.

id = "losses/last_micro_batch"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "deepspeedai/DeepSpeed#7981",
    "deepspeedai/DeepSpeed#7985",
    "allenai/open-instruct#1498",
]
date = "2026-04"
tags = ["zero", "accumulation", "adam"]

[wrong.buffer_is_overwritten]
title = "the buffer is overwritten"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.last_micro_batch_is_added_after_all_reduce]
title = "the last micro-batch is added after the all-reduce"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
MICRO_BATCHES = 4


class Engine:
    """Adds the gradients of micro-batches to buffers, and updates with their mean over ranks."""

    def __init__(self, model, optimizer):
        self.weights, self.optimizer = list(model.parameters()), optimizer
        self.buffers = [torch.zeros_like(weight) for weight in self.weights]

    def backward(self, loss, is_last):
        gradients = torch.autograd.grad(loss / MICRO_BATCHES, self.weights)
        if BUG == "last_micro_batch_is_added_after_all_reduce" and is_last:
            self.all_reduce()
        for buffer, gradient in zip(self.buffers, gradients, strict=True):
            if BUG == "buffer_is_overwritten":
                buffer.copy_(gradient)
            else:
                buffer += gradient
        if BUG != "last_micro_batch_is_added_after_all_reduce" and is_last:
            self.all_reduce()

    def all_reduce(self):
        for buffer in self.buffers if WORLD > 1 else ():
            dist.all_reduce(buffer)
            buffer /= WORLD

    def step(self):
        for weight, buffer in zip(self.weights, self.buffers, strict=True):
            weight.grad = buffer.clone()
            buffer.zero_()
        self.optimizer.step()


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(10, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, 5))
if WORLD > 1:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, eps=1e-4)
else:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
engine = Engine(model, optimizer)
x, y = torch.randn(2, 32, 10), torch.randint(5, (2, 32))
with harness.training(model, optimizer):
    for step in range(2):
        inputs = x[step, RANK::WORLD].chunk(MICRO_BATCHES)
        targets = y[step, RANK::WORLD].chunk(MICRO_BATCHES)
        for i in range(MICRO_BATCHES):
            loss = F.cross_entropy(model(inputs[i]), targets[i])
            engine.backward(loss, is_last=i == MICRO_BATCHES - 1)
        engine.step()
if WORLD > 1:
    dist.destroy_process_group()
