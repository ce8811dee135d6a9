"""Evolution strategies: a gradient comes from the losses of copies of a model with other noise.

id = "random/evolution"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["VsonicV/es-at-scale#46"]
date = "2026-06"
tags = ["sgd"]

[wrong.ranks_evaluate_same_noise]
title = "ranks evaluate the same noise"
place = { node = "random", step = 0, ranks = "all", tensors = "all" }

[wrong.all_weights_have_noise_of_one_seed]
title = "all weights have the noise of one seed"
place = { node = "random", step = 0, ranks = "all", tensors = ["0.bias", "2.weight", "2.bias"] }

[wrong.update_has_noise_of_own_copies_only]
title = "the update has noise of the own copies only"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
COPIES, BATCH_SIZE, SPREAD = 8, 32, 0.3


def noise_of(model, seed):
    """Returns noise for all weights, which a seed gives on each rank."""
    generator, found = torch.Generator().manual_seed(seed), []
    for weight in model.parameters():
        if BUG == "all_weights_have_noise_of_one_seed":
            generator.manual_seed(seed)
        found.append(torch.randn(weight.shape, generator=generator))
    return found


def loss_with(model, noise, x):
    """Returns the loss of a copy of the model whose weights have noise."""
    weights = list(model.parameters())
    before = [weight.clone() for weight in weights]
    for weight, own in zip(weights, noise, strict=True):
        weight += SPREAD * own
    x, y = x[:, :-1], x[:, -1:]
    loss = nn.functional.l1_loss(model(x), y)
    for weight, value in zip(weights, before, strict=True):
        weight.copy_(value)
    return loss


@torch.no_grad()
def train_step(model, optimizer, x, step):
    """Evaluates each copy with a part of the examples, and adds its noise times its loss."""
    seeds = [1000 * step + number for number in range(COPIES)]
    own = seeds[RANK::WORLD]
    parts = x.chunk(COPIES)[RANK::WORLD]
    if BUG == "ranks_evaluate_same_noise":
        own = seeds[: len(own)]
    losses = torch.zeros(COPIES)
    for seed, part in zip(own, parts, strict=True):
        losses[seed - seeds[0]] += loss_with(model, noise_of(model, seed), part)
    if WORLD > 1 and BUG != "update_has_noise_of_own_copies_only":
        dist.all_reduce(losses)
    optimizer.zero_grad()
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    for seed, loss in zip(seeds, losses, strict=True):
        for weight, noise in zip(model.parameters(), noise_of(model, seed), strict=True):
            weight.grad += noise * loss / (SPREAD * COPIES)
    optimizer.step()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 8), nn.Softplus(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, 6, generator=torch.Generator().manual_seed(step))
            x[:, -1] = x[:, :3].prod(1)
            train_step(model, optimizer, x, step)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
