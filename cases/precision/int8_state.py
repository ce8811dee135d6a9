"""Sharding decides by the size of the own part whether the state is kept in 8 bits.

id = "precision/int8_state"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["pytorch/ao#4912", "bitsandbytes-foundation/bitsandbytes#2080"]
date = "2026-09"
tags = ["gathered"]

[wrong.size_of_own_part_is_compared_with_limit]
title = "the size of the own part is compared with the limit"
place = { node = "update", step = 0, ranks = "all", tensors = ["0.weight"] }

[wrong.scale_is_that_of_all_blocks]
title = "the scale is that of all blocks"
place = { node = "update", step = 0, ranks = "all", tensors = ["0.weight"] }

[wrong.state_is_truncated_not_rounded]
title = "the state is truncated, not rounded"
place = { node = "update", step = 0, ranks = "all", tensors = ["0.weight"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
LIMIT, BLOCK = 96, 16


def in_8_bits(state):
    """Rounds to 8 bits, with one scale for each block."""
    blocks = state.view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    if BUG == "scale_is_that_of_all_blocks":
        largest = largest.max()
    scale = largest.clamp(min=1e-12) / 127
    levels = blocks / scale
    truncated = BUG == "state_is_truncated_not_rounded"
    levels = levels.trunc() if truncated else levels.round()
    return (levels * scale).view_as(state)


class ShardedMomentum(torch.optim.Optimizer):
    """Momentum in 8 bits for large weights; each rank updates its rows."""

    def __init__(self, params, lr, beta):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                own = weight.chunk(WORLD)[RANK]
                gradient = weight.grad.chunk(WORLD)[RANK]
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(own)
                momentum = state["momentum"].lerp_(gradient, 1 - group["beta"])
                size = weight.numel()
                if BUG == "size_of_own_part_is_compared_with_limit":
                    size = own.numel()
                if size >= LIMIT:
                    momentum.copy_(in_8_bits(momentum))
                updated = own - group["lr"] * momentum
                if WORLD > 1:
                    parts = [torch.empty_like(updated) for _ in range(WORLD)]
                    dist.all_gather(parts, updated)
                    updated = torch.cat(parts)
                weight.copy_(updated)


torch.manual_seed(0)
if WORLD > 1:
    dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))
optimizer = ShardedMomentum(model.parameters(), lr=0.5, beta=0.9)
with harness.training(model, optimizer):
    for step in range(3):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        y = x[:, :4].argmin(dim=1)
        loss = nn.functional.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD])
        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters() if WORLD > 1 else ():
            dist.all_reduce(weight.grad)
            weight.grad /= WORLD
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
