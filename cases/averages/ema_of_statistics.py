"""An average of the weights without the statistics of normalisation, or with those of one rank.

id = "averages/ema_of_statistics"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "Megvii-BaseDetection/YOLOX#1176",
    "CuriousAI/mean-teacher#9",
    "lucidrains/ema-pytorch#8",
]
date = "2022-03"
tags = ["averages", "sgd"]

[wrong.statistics_are_left_out]
title = "statistics are left out"
place = { node = "update", step = 0, ranks = "all", tensors = ["teacher.1.mean", "teacher.1.var"] }

[wrong.statistics_of_own_examples]
title = "statistics of the own examples"
place = { node = "update", step = 0, ranks = "all", tensors = ["1.mean", "1.var"] }

[wrong.statistics_are_averaged_in_place_of_copied]
title = "statistics are averaged in place of copied"
place = { node = "update", step = 0, ranks = "all", tensors = ["teacher.1.mean", "teacher.1.var"] }
"""

import os
from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class SyncNorm(nn.Module):
    """Normalises over the examples of all ranks."""

    def __init__(self, width, momentum=0.3):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))
        self.momentum = momentum

    def forward(self, x):
        moments = torch.stack([x.mean(0), (x * x).mean(0)])
        own = moments.detach()
        if WORLD > 1:
            moments = all_reduce(moments) / WORLD
        mean, var = moments[0], moments[1] - moments[0] ** 2
        if BUG == "statistics_of_own_examples":
            self.follow(own[0], own[1] - own[0] ** 2)
        else:
            self.follow(mean.detach(), var.detach())
        return self.scale * (x - mean) * (var + 1e-3).rsqrt() + self.shift

    @torch.no_grad()
    def follow(self, mean, var):
        self.mean.lerp_(mean, self.momentum)
        self.var.lerp_(var, self.momentum)


@torch.no_grad()
def update(teacher, student, decay=0.8):
    for mean, weight in zip(teacher.parameters(), student.parameters(), strict=True):
        mean.mul_(decay).add_(weight, alpha=1 - decay)
    if BUG == "statistics_are_left_out":
        return
    for mean, value in zip(teacher.buffers(), student.buffers(), strict=True):
        if BUG == "statistics_are_averaged_in_place_of_copied":
            mean.mul_(decay).add_(value, alpha=1 - decay)
        else:
            mean.copy_(value)


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(1)
student = nn.Sequential(nn.Linear(6, 12, bias=False), SyncNorm(12), nn.ReLU(), nn.Linear(12, 3))
teacher = deepcopy(student).requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
with harness.training(student, optimizer, others={"teacher": teacher}):
    for _ in range(2):
        x = torch.randn(20, 6) * 2 + torch.arange(20)[:, None] / 10
        x = x.chunk(WORLD)[RANK]
        loss = F.cross_entropy(student(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        for weight in student.parameters():
            if WORLD > 1:
                dist.all_reduce(weight.grad)
                weight.grad /= WORLD
        optimizer.step()
        update(teacher, student)
if WORLD > 1:
    dist.destroy_process_group()
