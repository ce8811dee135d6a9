"""A schedule advances once per process, and more processes resume than have saved.

id = "resume/processes_in_schedule"
framework = "torch"
processes = 2
save_processes = 1
steps = 4
mode = "resume"
references = ["huggingface/diffusers#8312", "huggingface/accelerate#2318"]
date = "2024-01"
tags = ["ddp", "adam"]

[wrong.place_of_one_process_is_taken_over]
title = "the place of one process is taken over"
place = { node = "update", step = 2, ranks = "all", tensors = "all" }

[wrong.number_of_all_steps_is_that_of_one_process]
title = "the number of all steps is that of one process"
place = { node = "update", step = 2, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, HALF, BATCH_SIZE, WARMUP, TOTAL = 4, 2, 12, 1, 6


class Schedule:
    """Warms up and decays linearly; its steps are those of all processes."""

    def __init__(self, optimizer, warmup, total):
        self.optimizer, self.warmup, self.total, self.place = optimizer, warmup, total, 0
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.apply()

    def apply(self):
        part = (self.place + WORLD) / (self.warmup + WORLD)
        if self.place >= self.warmup:
            part = max(0.0, (self.total - self.place) / (self.total - self.warmup))
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * part

    def step(self):
        """Follows an update, after which each process has one step."""
        self.place += WORLD
        self.apply()

    def load(self, state):
        ratio = WORLD / state["processes"]
        if BUG == "place_of_one_process_is_taken_over":
            ratio = 1
        self.place = int(state["place"] * ratio)
        self.apply()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(26)
    model = nn.Sequential(nn.Linear(6, 20), nn.CELU(), nn.Linear(20, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters()}]
    optimizer = torch.optim.Adam(groups, lr=0.1, eps=1e-3)
    processes = 1 if BUG == "number_of_all_steps_is_that_of_one_process" else WORLD
    schedule = Schedule(optimizer, WARMUP * processes, TOTAL * processes)
    if LOAD:
        state = torch.load(LOAD + ".pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load(state["schedule"])
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    with harness.training(ddp, optimizer):
        for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
            x = torch.randn(BATCH_SIZE, 6, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            nn.functional.smooth_l1_loss(ddp(x), x[:, :2] * x[:, 4:]).backward()
            optimizer.step()
            schedule.step()
    if SAVE and RANK == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state["schedule"] = {"place": schedule.place, "processes": WORLD}
        torch.save(state, SAVE + ".pt")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
