"""Float8 layers with delayed scaling: the largest value is not reduced over the ranks.

id = "precision/float8_amax"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["AMD-AGI/Primus#669", "NVIDIA/TransformerEngine#11", "pytorch/ao#570"]
date = "2026-04"
tags = ["low_precision", "sgd"]

[wrong.largest_value_is_that_of_own_examples]
title = "the largest value is that of the own examples"
place = { node = "update", step = 0, ranks = [1], tensors = ["*.amax_history"] }

[wrong.largest_values_are_averaged]
title = "largest values are averaged"
place = { node = "update", step = 0, ranks = "all", tensors = ["*.amax_history"] }

[wrong.history_is_not_moved_on]
title = "the history is not moved on"
place = { node = "update", step = 1, ranks = "all", tensors = ["*.amax_history"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Cast(torch.autograd.Function):
    """Rounds to float8; the gradient passes through."""

    @staticmethod
    def forward(ctx, x, scale):
        limit = torch.finfo(torch.float8_e4m3fn).max
        return (x * scale).clamp(-limit, limit).to(torch.float8_e4m3fn).float() / scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def scale_of(amax):
    return torch.exp2(torch.floor(torch.log2(448 / amax.clamp(min=1e-12))))


class Float8Linear(nn.Linear):
    """Scales inputs by the largest value of the last two steps."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("amax_history", torch.full((2,), 1e4))

    def forward(self, x):
        scale = scale_of(self.amax_history.max())
        amax = x.detach().abs().max()
        if WORLD > 1 and BUG == "largest_values_are_averaged":
            dist.all_reduce(amax)
            amax /= WORLD
        elif WORLD > 1 and BUG != "largest_value_is_that_of_own_examples":
            dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        if BUG != "history_is_not_moved_on":
            self.amax_history.copy_(self.amax_history.roll(1))
        self.amax_history[0] = amax
        weight = Cast.apply(self.weight, scale_of(self.weight.detach().abs().max()))
        return nn.functional.linear(Cast.apply(x, scale), weight, self.bias)


torch.manual_seed(0)
if WORLD > 1:
    dist.init_process_group("gloo")
model = nn.Sequential(Float8Linear(8, 16), nn.GELU(), Float8Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
with harness.training(model, optimizer):
    for step in range(3):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        x[step // 2 :: 2] *= 6  # One rank has the large values: rank 1 in the last step.
        y = x[:, :4]
        loss = (model(x[RANK::WORLD]) - y[RANK::WORLD]).square().mean() / WORLD
        loss.backward()
        for weight in model.parameters() if WORLD > 1 else ():
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
if WORLD > 1:
    dist.destroy_process_group()
