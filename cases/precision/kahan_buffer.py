"""The Kahan compensation of sharded bfloat16 weights gets lost between steps.

id = "precision/kahan_buffer"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["arXiv 2010.06192", "pytorch/torchdistx#52"]
date = "2020-10"
tags = ["low_precision", "gathered"]

[wrong.compensation_starts_at_zero_in_each_step]
title = "compensation starts at zero in each step"
place = { node = "update", step = 1, ranks = "all", tensors = "all" }

[wrong.compensation_is_never_added]
title = "compensation is never added"
place = { node = "update", step = 1, ranks = "all", tensors = "all" }

[wrong.compensation_has_wrong_sign]
title = "compensation has the wrong sign"
place = { node = "update", step = 1, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class KahanSGD(torch.optim.Optimizer):
    """Each rank updates its rows of each weight; their rounding errors are kept in state."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                self._update(weight, group["lr"])

    def _update(self, weight, lr):
        own = weight.chunk(WORLD)[RANK]
        gradient = weight.grad.chunk(WORLD)[RANK]
        state = self.state[weight]
        if not state or BUG == "compensation_starts_at_zero_in_each_step":
            state["compensation"] = torch.zeros_like(own)
        compensation = state["compensation"]
        update = -lr * gradient
        if BUG != "compensation_is_never_added":
            update += -compensation if BUG == "compensation_has_wrong_sign" else compensation
        rounded = (own + update).bfloat16().float()
        compensation.copy_(update - (rounded - own))
        if WORLD > 1:
            parts = [torch.empty_like(own) for _ in range(WORLD)]
            dist.all_gather(parts, rounded)
            rounded = torch.cat(parts)
        weight.copy_(rounded)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return model


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    model = build()
    optimizer = KahanSGD(model.parameters(), lr=0.02)
    with harness.training(model, optimizer):
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x, noise = torch.randn(2, 8, 8, generator=generator)
            y = x[:, :4] + 0.1 * noise[:, :4]
            loss = nn.functional.mse_loss(model(x[RANK::WORLD]), y[RANK::WORLD])
            model.zero_grad()
            loss.backward()
            for weight in model.parameters() if WORLD > 1 else ():
                dist.all_reduce(weight.grad)
                weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
