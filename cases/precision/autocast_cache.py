"""The cache of autocast keeps 16-bit copies of weights that have changed since.

id = "precision/autocast_cache"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["X-GenGroup/Flow-Factory#186", "NVIDIA/apex#132"]
date = "2026-06"
tags = ["low_precision", "sgd"]

[wrong.one_autocast_region_around_all_steps]
title = "one autocast region around all steps"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.one_autocast_region_for_both_policies]
title = "one autocast region for both policies"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


@contextlib.contextmanager
def swapped(model, reference):
    """Has the weights of the reference policy in the model, in place."""
    own = [weight.detach().clone() for weight in model.parameters()]
    for weight, other in zip(model.parameters(), reference, strict=True):
        weight.data.copy_(other)
    yield
    for weight, other in zip(model.parameters(), own, strict=True):
        weight.data.copy_(other)


def main():
    torch.manual_seed(0)
    if WORLD > 1:
        dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    reference = [weight.detach() + 0.5 * torch.randn_like(weight) for weight in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    around_steps = around_both = contextlib.nullcontext
    if BUG == "one_autocast_region_around_all_steps":
        around_steps = autocast
    if BUG == "one_autocast_region_for_both_policies":
        around_both = autocast
    with harness.training(model, optimizer), around_steps():
        for step in range(3):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            y = x[:, :4].sign()
            x, y = x[RANK::WORLD], y[RANK::WORLD]
            with around_both():
                with autocast():
                    output = model(x).float()
                with swapped(model, reference), torch.no_grad(), autocast():
                    target = forward(model, x)
            loss = (output - y).square().mean() + (output - target).square().mean()
            (loss / WORLD).backward()
            for weight in model.parameters() if WORLD > 1 else ():
                dist.all_reduce(weight.grad)
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


def forward(model, x):
    """Calls the layers one by one: this is no step of the training."""
    for layer in model:
        x = layer(x)
    return x.float()


main()
