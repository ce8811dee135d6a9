"""An engine that accumulates gradients keeps one micro-batch of a step, or reduces too early.

reference = "deepspeedai/DeepSpeed#7981, deepspeedai/DeepSpeed#7985, allenai/open-instruct#1498"
date = "2026-04"
framework = "torch"

[wrong]
"the buffer is overwritten" = ["lost_micro_batch"]
"the last micro-batch is added after the all-reduce" = ["not_all_reduced", "lost_micro_batch"]
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F

import lockstep

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
        if BUG == "the last micro-batch is added after the all-reduce" and is_last:
            self.all_reduce()
        for buffer, gradient in zip(self.buffers, gradients, strict=True):
            if BUG == "the buffer is overwritten":
                buffer.copy_(gradient)
            else:
                buffer += gradient
        if BUG != "the last micro-batch is added after the all-reduce" and is_last:
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
with lockstep.record(model, optimizer):
    for step in range(2):
        inputs = x[step, RANK::WORLD].chunk(MICRO_BATCHES)
        targets = y[step, RANK::WORLD].chunk(MICRO_BATCHES)
        for i in range(MICRO_BATCHES):
            loss = F.cross_entropy(model(inputs[i]), targets[i])
            engine.backward(loss, is_last=i == MICRO_BATCHES - 1)
        engine.step()
if WORLD > 1:
    dist.destroy_process_group()
