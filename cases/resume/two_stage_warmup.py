"""Backbone and head warm up one after the other; a checkpoint must have the place in the schedule.

id = "resume/two_stage_warmup"
framework = "torch"
processes = 2
steps = 5
mode = "resume"
references = ["lightly-ai/lightly-train#301"]
date = "2025-09"
tags = ["ddp", "adam"]

[wrong.schedule_is_not_saved]
title = "the schedule is not saved"
place = { node = "update", step = 3, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, STEPS, SAVED_STEPS = 16, 5, 3


def head_factor(step):
    return min(1, (step + 1) / 2) * (1 - step / 10) ** 0.9


def backbone_factor(step):
    return min(1, max(0, step - 1) / 2) * (1 - step / 10) ** 0.9


def main():
    save, load = os.environ.get("SAVE"), os.environ.get("LOAD")
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(81)
    backbone = nn.Sequential(nn.Linear(8, 16), nn.GELU())
    head = nn.Linear(16, 5)
    model = nn.Sequential(backbone, head)
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    groups = [{"params": backbone.parameters(), "lr": 0.02}, {"params": head.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.05, eps=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [backbone_factor, head_factor])
    first = 0
    if load:
        state = torch.load(load)
        model.load_state_dict(state["model"])
        first = state["step"]
        optimizer.load_state_dict(state["optimizer"])
        if BUG == "schedule_is_not_saved":
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [backbone_factor, head_factor])
        else:
            schedule.load_state_dict(state["schedule"])
    last = SAVED_STEPS if save else STEPS
    with harness.training(ddp, optimizer):
        for step in range(first, last):
            x = torch.randn(BATCH_SIZE, 8, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.cross_entropy(ddp(x), x[:, :5].argmax(1)).backward()
            optimizer.step()
            schedule.step()
    if save and RANK == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": last}
        torch.save(state | {"schedule": schedule.state_dict()}, save)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
