"""Losses of two tasks are weighted by learned uncertainties, which are no part of the network.

id = "losses/task_uncertainty"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["ifzhang/FairMOT#19"]
date = "2020-04"
tags = ["adam"]

[wrong.optimizer_does_not_know_them]
title = "the optimizer does not know them"
place = { node = "start", step = 0, ranks = "all", tensors = ["uncertainties"] }

[wrong.their_gradients_are_not_reduced]
title = "their gradients are not reduced"
place = { node = "sum", step = 0, ranks = "all", tensors = ["uncertainties"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, FEATURES, CLASSES = 16, 8, 5


class Tracker(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(FEATURES, 18), nn.GELU())
        self.place, self.identity = nn.Linear(18, 2), nn.Linear(18, CLASSES)

    def forward(self, x):
        x = self.trunk(x)
        return self.place(x), self.identity(x)


class Both(nn.Module):
    """A network, and the logarithms of the variances of its tasks."""

    def __init__(self):
        super().__init__()
        self.network = Tracker()
        self.uncertainties = nn.Parameter(torch.tensor([-0.5, -1.0]))

    def forward(self, x):
        return self.network(x)

    def loss_of(self, outputs, place, identity):
        losses = torch.stack([
            F.l1_loss(outputs[0], place), F.cross_entropy(outputs[1], identity),
        ])  # fmt: skip
        return ((-self.uncertainties).exp() * losses + self.uncertainties).sum() / 2


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(57)
    model = Both()
    trained = list(model.parameters())
    if BUG == "optimizer_does_not_know_them":
        trained = list(model.network.parameters())
    reduced = list(model.parameters())
    if BUG == "their_gradients_are_not_reduced":
        reduced = list(model.network.parameters())
    optimizer = torch.optim.Adam(trained, lr=0.02, eps=1e-4)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, FEATURES, generator=torch.Generator().manual_seed(step))
            x[: BATCH_SIZE // 2] *= 3
            x = x.chunk(WORLD)[RANK]
            outputs = model(x)
            model.zero_grad()
            model.loss_of(outputs, x[:, :2] * x[:, 2:4], x[:, :CLASSES].argmax(1)).backward()
            for weight in reduced:
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
