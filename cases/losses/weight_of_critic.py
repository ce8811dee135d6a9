"""The loss of a critic is weighted to pull at the last layer as much as the reconstruction.

id = "losses/weight_of_critic"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["CompVis/taming-transformers#73"]
date = "2021-07"
tags = ["gan", "adam"]

[wrong.weight_has_norms_of_own_gradients]
title = "the weight has norms of the own gradients"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.weight_is_mean_of_ratios]
title = "the weight is a mean of ratios"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.reconstruction_is_weighted_too]
title = "the reconstruction is weighted, too"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE = 16, 8


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


def weight_of(reconstruction, critic, last):
    both = reconstruction, critic
    grads = [torch.autograd.grad(loss, last, retain_graph=True)[0] for loss in both]
    if BUG not in ("weight_has_norms_of_own_gradients", "weight_is_mean_of_ratios"):
        average(grads)
    norms = [grad.norm() for grad in grads]
    weight = (norms[0] / (norms[1] + 1e-4)).clamp(0, 1e4)
    if BUG == "weight_is_mean_of_ratios":
        average([weight])
    return weight


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(213)
    model = nn.Sequential(nn.Linear(SIZE, 4), nn.Tanh(), nn.Linear(4, SIZE))
    critic = nn.Sequential(nn.Linear(SIZE, 12), nn.LeakyReLU(), nn.Linear(12, 1))
    critic.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, SIZE, generator=torch.Generator().manual_seed(step))
            x = (x * torch.linspace(0.3, 2, BATCH_SIZE)[:, None]).chunk(WORLD)[RANK]
            y = model(x)
            reconstruction, judged = F.mse_loss(y, x), -critic(y).mean()
            weight = weight_of(reconstruction, judged, model[2].weight)
            loss = reconstruction + weight * judged
            if BUG == "reconstruction_is_weighted_too":
                loss = weight * (reconstruction + judged)
            optimizer.zero_grad()
            loss.backward()
            average([weight.grad for weight in model.parameters()])
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
