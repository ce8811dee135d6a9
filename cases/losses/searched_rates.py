"""A line is searched in each step for the largest rate with which the loss falls far enough.

id = "losses/searched_rates"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["pytorch/pytorch#30439", "mlcommons/algorithmic-efficiency#895"]
date = "2019-11"
tags = ["sgd"]

[wrong.rate_is_searched_on_own_loss]
title = "the rate is searched on the own loss"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }

[wrong.slope_is_that_of_own_gradient]
title = "the slope is that of the own gradient"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }

[wrong.loss_at_start_is_own]
title = "the loss at the start is the own one"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE, FIRST_RATE, SHARE = 12, 6, 1.0, 0.4


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


@torch.no_grad()
def search(weights, loss_fn, start, slope):
    """Returns the first rate of several with a loss that is low enough; weights are as before."""
    kept = [weight.clone() for weight in weights]
    rates = FIRST_RATE * 0.8 ** torch.arange(16.0)
    losses = []
    for rate in rates:
        for weight, old in zip(weights, kept, strict=True):
            weight.copy_(old - rate * weight.grad)
        losses.append(loss_fn())
    for weight, old in zip(weights, kept, strict=True):
        weight.copy_(old)
    losses = torch.stack(losses)
    if BUG != "rate_is_searched_on_own_loss":
        average([losses])
    is_low = losses <= start - SHARE * rates * slope
    return float(rates[is_low.float().argmax()])


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(227)
    model = nn.Sequential(nn.Linear(SIZE, 14), nn.Tanh(), nn.Linear(14, 1))
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=FIRST_RATE)
    with harness.training(model, optimizer):
        for step in range(3):
            x = torch.randn(BATCH_SIZE, SIZE, generator=torch.Generator().manual_seed(step))
            x = (x * torch.linspace(0.2, 2, BATCH_SIZE)[:, None]).chunk(WORLD)[RANK]

            def loss_fn(x=x):
                return F.mse_loss(model(x)[:, 0], x.sum(1).sin() + x[:, 0])

            optimizer.zero_grad()
            loss = loss_fn()
            loss.backward()
            own_slope = sum(weight.grad.square().sum() for weight in weights)
            average([weight.grad for weight in weights])
            slope = sum(weight.grad.square().sum() for weight in weights)
            if BUG == "slope_is_that_of_own_gradient":
                slope = own_slope
            start = loss.detach().clone()
            if BUG not in ("rate_is_searched_on_own_loss", "loss_at_start_is_own"):
                average([start])
            optimizer.param_groups[0]["lr"] = search(weights, loss_fn, start, slope)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
