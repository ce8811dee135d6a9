"""Self-distillation: the centre of the teacher's outputs is divided by a wrong number.

id = "averages/dino_center"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["facebookresearch/dinov2#546", "lightly-ai/lightly-train#968"]
date = "2025-07"
tags = ["ddp", "averages", "adam"]

[wrong.number_of_rows_is_taken_as_1]
title = "the number of rows is taken as 1"
place = { node = "update", step = 0, ranks = "all", tensors = ["center"] }

[wrong.centre_of_own_rows]
title = "the centre of the own rows"
place = { node = "update", step = 0, ranks = "all", tensors = ["center"] }

[wrong.sum_is_not_divided_by_ranks]
title = "the sum is not divided by the ranks"
place = { node = "update", step = 0, ranks = "all", tensors = ["center"] }
"""

import os
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH, PROTOTYPES = 8, 12


class DinoLoss(nn.Module):
    def __init__(self, momentum=0.6, student_heat=0.5, teacher_heat=0.2):
        super().__init__()
        self.momentum, self.heats = momentum, (student_heat, teacher_heat)
        self.register_buffer("center", torch.zeros(1, PROTOTYPES))

    def forward(self, student, teacher):
        targets = ((teacher - self.center) / self.heats[1]).softmax(-1).detach()
        return -(targets * (student / self.heats[0]).log_softmax(-1)).sum(-1).mean()

    @torch.no_grad()
    def update(self, teacher):
        total, number = teacher.sum(0, keepdim=True), len(teacher)
        ranks = WORLD
        if BUG == "number_of_rows_is_taken_as_1":
            number = 1
        if BUG == "sum_is_not_divided_by_ranks":
            ranks = 1
        if BUG == "centre_of_own_rows":
            ranks = 1
        elif WORLD > 1:
            dist.all_reduce(total)
        self.center.lerp_(total / (number * ranks), 1 - self.momentum)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, PROTOTYPES))
    teacher = deepcopy(net).requires_grad_(False)
    loss_fn = DinoLoss()
    student = DistributedDataParallel(net) if WORLD > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.05)
    with harness.training(student, optimizer, others={"teacher": teacher, "loss": loss_fn}):
        for _ in range(2):
            images = torch.randn(16, WIDTH)
            views = images + 0.1 * torch.randn(16, WIDTH)
            images, views = images[RANK::WORLD], views[RANK::WORLD]
            outputs = teacher(images)
            loss = loss_fn(student(views), outputs)
            loss_fn.update(outputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mean, weight in zip(teacher.parameters(), net.parameters(), strict=True):
                    mean.lerp_(weight, 0.1)
    if WORLD > 1:
        dist.destroy_process_group()


main()
