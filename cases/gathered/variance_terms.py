"""Variance and covariance of features are those of a rank's batch, or of sums of features.

id = "gathered/variance_terms"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["KevinMusgrave/pytorch-metric-learning#535", "lightly-ai/lightly#979"]
date = "2022-10"
tags = ["gathered"]

[wrong.statistics_of_own_features]
title = "statistics of the own features"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.features_are_added_not_gathered]
title = "features are added, not gathered"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def of_all_ranks(z):
    if WORLD == 1 or BUG == "statistics_of_own_features":
        return z
    if BUG == "features_are_added_not_gathered":
        return all_reduce(z)
    return all_gather_tensor_autograd(z, gather_dim=0, group=dist.group.WORLD)


def vicreg_loss(first, second):
    loss = 10 * F.mse_loss(first, second)
    for z in (of_all_ranks(first), of_all_ranks(second)):
        z = z - z.mean(0)
        loss = loss + 10 * F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
        covariance = z.T @ z / (len(z) - 1)
        loss = loss + (covariance - covariance.diag().diag()).square().sum() / z.shape[1]
    return loss


def average_gradients(model):
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
        weight.grad.div_(WORLD)


def train(model, optimizer):
    generator = torch.Generator().manual_seed(8)
    for _ in range(2):
        x = torch.randn(16, 9, generator=generator)
        first, second = (x + 0.3 * torch.randn(16, 9, generator=generator) for _ in range(2))
        z = model(torch.cat([first[RANK::WORLD], second[RANK::WORLD]]))
        optimizer.zero_grad()
        vicreg_loss(*z.chunk(2)).backward()
        if WORLD > 1:
            average_gradients(model)
        optimizer.step()


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [nn.Linear(9, 24), nn.ELU(), nn.Linear(24, 24), nn.ELU()]
model = nn.Sequential(*layers, nn.Linear(24, 12, bias=False))  # The loss sees no shift.
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02, eps=1e-4)
with harness.training(model, optimizer):
    train(model, optimizer)
if WORLD > 1:
    dist.destroy_process_group()
