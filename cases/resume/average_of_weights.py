"""A checkpoint has weights and their average, and a resumed training starts with only one of both.

id = "resume/average_of_weights"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["Megvii-BaseDetection/YOLOX#1318", "ai2cm/ace#349"]
date = "2022-05"
tags = ["ddp", "averages", "sgd"]

[wrong.weights_are_loaded_from_average]
title = "weights are loaded from the average"
place = { node = "start", step = 2, ranks = "all", tensors = "all" }

[wrong.average_starts_at_loaded_weights]
title = "the average starts at the loaded weights"
place = { node = "start", step = 2, ranks = "all", tensors = ["ema.*"] }
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, HALF, BATCH, DECAY = 4, 2, 8, 0.7


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(1, 6, 3, padding=1)
        self.boxes, self.scores = nn.Linear(6, 4), nn.Linear(6, 1)

    def forward(self, images):
        x = torch.relu(self.features(images)).mean((2, 3))
        return torch.cat([self.boxes(x), self.scores(x)], 1)


def load(model, average, optimizer):
    state = torch.load(LOAD + ".pt")
    is_swapped = BUG == "weights_are_loaded_from_average"
    model.load_state_dict(state["average" if is_swapped else "model"])
    is_lost = BUG == "average_starts_at_loaded_weights"
    average.load_state_dict(state["model" if is_lost else "average"])
    optimizer.load_state_dict(state["optimizer"])


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(21)
model = Detector()
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, nesterov=True)
if LOAD:
    load(model, average, optimizer)
ddp = DistributedDataParallel(model) if WORLD > 1 else model
with harness.training(ddp, optimizer, others={"ema": average}):
    for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
        images = torch.rand(BATCH, 1, 5, 5, generator=torch.Generator().manual_seed(step))
        own = images[RANK::WORLD]
        targets = own.flatten(1)[:, :5]
        optimizer.zero_grad()
        nn.functional.l1_loss(ddp(own), targets).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 1 - DECAY)
if SAVE and RANK == 0:
    state = {"model": model, "average": average, "optimizer": optimizer}
    torch.save({name: part.state_dict() for name, part in state.items()}, SAVE + ".pt")
if WORLD > 1:
    dist.destroy_process_group()
