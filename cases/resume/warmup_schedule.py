"""The optimizer is loaded before the schedule is created, which sets the rate of step 0.

id = "resume/warmup_schedule"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["torch-points3d/torch-points3d#630", "victoresque/pytorch-template#68"]
date = "2021-06"
tags = ["ddp"]

[wrong.schedule_is_created_after_load]
title = "the schedule is created after the load"
place = { node = "update", step = 2, ranks = "all", tensors = "all" }

[wrong.schedule_starts_again]
title = "the schedule starts again"
place = { node = "update", step = 3, ranks = "all", tensors = "all" }

[wrong.one_more_step_of_schedule_at_load]
title = "one more step of the schedule at the load"
place = { node = "update", step = 2, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CONFIG = {"steps": 4, "half": 2, "batch": 8, "lr": 0.02, "warmup": 6}


def warm_up(step):
    return (step + 1) / CONFIG["warmup"]


def load(model, optimizer, schedule):
    state = torch.load(LOAD + ".pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if BUG == "schedule_is_created_after_load":
        schedule = LambdaLR(optimizer, warm_up)
    if BUG != "schedule_starts_again":
        schedule.load_state_dict(state["schedule"])
    if BUG == "one_more_step_of_schedule_at_load":
        schedule.step()
    return schedule


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(9)
layers = [nn.Conv1d(2, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.ReLU(), nn.Flatten()]
model = nn.Sequential(*layers, nn.Linear(64, 2))
wrapped = DistributedDataParallel(model) if WORLD > 1 else model
optimizer = torch.optim.RMSprop(model.parameters(), lr=CONFIG["lr"], eps=1e-2)
schedule = LambdaLR(optimizer, warm_up)
if LOAD:
    schedule = load(model, optimizer, schedule)
first = CONFIG["half"] if LOAD else 0
last = CONFIG["half"] if SAVE else CONFIG["steps"]
data = torch.Generator().manual_seed(1)
points = torch.randn(CONFIG["steps"], CONFIG["batch"], 2, 12, generator=data)
with harness.training(wrapped, optimizer):
    for step in range(first, last):
        x = points[step, RANK::WORLD]
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(wrapped(x), x.std(2)).backward()
        optimizer.step()
        schedule.step()
if SAVE and RANK == 0:
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    torch.save({name: part.state_dict() for name, part in state.items()}, SAVE + ".pt")
if WORLD > 1:
    dist.destroy_process_group()
