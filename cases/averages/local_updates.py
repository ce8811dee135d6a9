"""Lateral weights follow the activity of a layer in each pass, by no gradient, on every rank.

id = "averages/local_updates"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["iCog-Labs-Dev/PC-Transformers#135"]
date = "2026-05"
tags = ["sgd"]

[wrong.each_rank_follows_its_own_activity]
title = "each rank follows its own activity"
place = { node = "update", step = 0, ranks = "all", tensors = ["1.lateral"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE, WIDTH = 16, 6, 10


class Lateral(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("lateral", torch.eye(WIDTH) / 10)

    def forward(self, x):
        y = torch.tanh(x - x @ self.lateral.clone())
        with torch.no_grad():
            activity = y.T @ y / len(y)
            if WORLD > 1 and BUG != "each_rank_follows_its_own_activity":
                dist.all_reduce(activity)
                activity /= WORLD
            self.lateral.lerp_(activity, 0.3)
        return y


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(113)
    model = nn.Sequential(nn.Linear(SIZE, WIDTH), Lateral(), nn.Linear(WIDTH, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, SIZE, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x[:, :3] + x[:, 3:]).argmax(1)).backward()
            for weight in model.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
