"""A custom autograd function saves a tensor that is overwritten, or the wrong one.

id = "random/saved_tensor"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["linkedin/Liger-Kernel#254", "pytorch/pytorch#24413"]
date = "2024-09"
tags = ["ddp", "adam"]

[wrong.backward_pass_overwrites_what_another]
title = "the backward pass overwrites what another function saved"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["0.*", "1.value.*"] }

[wrong.output_is_saved_in_place_of_input]
title = "the output is saved in place of the input"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["0.*", "1.gate.*"] }

[wrong.gate_is_saved_before_it_is_shifted]
title = "the gate is saved before it is shifted"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["0.*", "1.gate.*", "1.value.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Exponential(torch.autograd.Function):
    """Saves its output, which is its derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.output = x.exp()
        return ctx.output.view_as(ctx.output)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.output


class SwiGLU(torch.autograd.Function):
    """silu(gate + 0.5) * value"""

    @staticmethod
    def forward(ctx, gate, value):
        shifted = gate + 0.5
        output = nn.functional.silu(shifted) * value
        if BUG == "output_is_saved_in_place_of_input":
            ctx.saved = shifted, output
        elif BUG == "gate_is_saved_before_it_is_shifted":
            ctx.saved = gate, value
        else:
            ctx.saved = shifted, value
        return output

    @staticmethod
    def backward(ctx, gradient):
        gate, value = ctx.saved
        sigmoid = gate.sigmoid()
        for_gate = gradient * value * (sigmoid + gate * sigmoid * (1 - sigmoid))
        for_value = gradient * gate * sigmoid
        if BUG == "backward_pass_overwrites_what_another":
            value.data.copy_(for_value)  # Saves memory.
            return for_gate, value
        return for_gate, for_value


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(SwiGLU.apply(self.gate(x), Exponential.apply(0.3 * self.value(x))))


torch.manual_seed(0)
model = nn.Sequential(FeedForward(), FeedForward(), nn.Linear(8, 3))
if WORLD > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.NAdam(model.parameters(), lr=0.01, eps=1e-3)
with harness.training(model, optimizer):
    for step in range(2):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        y = x[:, :3].abs().argmax(dim=1)
        loss = nn.functional.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
