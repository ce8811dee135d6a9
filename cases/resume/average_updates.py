"""The decay of an average of weights grows with the number of updates, which is not saved.

id = "resume/average_updates"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["lightly-ai/lightly-train#892", "ai2cm/ace#819"]
date = "2026-02"
tags = ["ddp", "sgd"]

[wrong.number_of_updates_starts_again]
title = "the number of updates starts again"
place = { node = "update", step = 2, ranks = "all", tensors = ["average.*"] }

[wrong.new_average_replaces_restored_one]
title = "a new average replaces the restored one"
place = { node = "start", step = 2, ranks = "all", tensors = ["average.*"] }

[wrong.only_rank_0_restores_average]
title = "only rank 0 restores the average"
place = { node = "start", step = 2, ranks = [1], tensors = ["average.*"] }
"""

import copy
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, HALF, BATCH_SIZE = 4, 2, 8


class Average:
    """Averages weights and statistics with a decay that grows to its limit."""

    def __init__(self, model, limit=0.95, tau=4):
        self.module = copy.deepcopy(model).requires_grad_(False)
        self.limit, self.tau, self.updates = limit, tau, 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = self.limit * (1 - math.exp(-self.updates / self.tau))
        for mean, weight in zip(self.module.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 1 - decay)

    def load(self, state):
        if BUG == "only_rank_0_restores_average" and RANK > 0:
            return
        self.module.load_state_dict(state["average"])
        if BUG != "number_of_updates_starts_again":
            self.updates = state["updates"]


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(23)
    model = nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.GroupNorm(1, 5), nn.Hardswish(), nn.Flatten(), nn.Linear(45, 3)
    )
    average = Average(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    if LOAD:
        state = torch.load(LOAD + ".pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        average.load(state)
        if BUG == "new_average_replaces_restored_one":
            average = Average(model)
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    with harness.training(ddp, optimizer, others={"average": average.module}):
        for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
            images = torch.randn(BATCH_SIZE, 1, 5, 5, generator=torch.Generator().manual_seed(step))
            own = images.chunk(WORLD)[RANK]
            targets = own[:, 0, :3].mean(2).softmax(1)
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(own), targets).backward()
            optimizer.step()
            average.update(model)
    if SAVE and RANK == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"average": average.module.state_dict(), "updates": average.updates}
        torch.save(state, SAVE + ".pt")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
