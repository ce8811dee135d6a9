"""A student is wrapped and its teacher is not: each rank moves its teacher towards the student.

id = "averages/teacher_of_detectors"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["facebookresearch/unbiased-teacher#31"]
date = "2021-07"
tags = ["ddp", "averages", "sgd"]

[wrong.teacher_moves_once_for_each_rank]
title = "the teacher moves once for each rank"
place = { node = "update", step = 0, ranks = "all", tensors = ["teacher.*"] }

[wrong.teacher_moves_before_update]
title = "the teacher moves before the update"
place = { node = "update", step = 0, ranks = "all", tensors = ["teacher.*"] }
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, CLASSES, DECAY = 16, 4, 0.8


@torch.no_grad()
def move(teacher, student):
    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.lerp_(fast, 1 - DECAY)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(86)
    student = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, CLASSES))
    teacher = copy.deepcopy(student).requires_grad_(False)
    ddp = DistributedDataParallel(student) if WORLD > 1 else student
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3, momentum=0.9)
    with harness.training(ddp, optimizer, others={"teacher": teacher}):
        for step in range(3):
            x = torch.randn(2 * BATCH_SIZE, 6, generator=torch.Generator().manual_seed(step))
            x = x[RANK::WORLD]
            labelled, plain = x.chunk(2)
            logits, others = ddp(x).chunk(2)
            loss = F.cross_entropy(logits, labelled[:, :CLASSES].argmax(1))
            loss = loss + F.kl_div(
                others.log_softmax(-1), teacher(plain).softmax(-1), reduction="batchmean"
            )
            optimizer.zero_grad()
            loss.backward()
            if BUG == "teacher_moves_before_update":
                move(teacher, student)
            optimizer.step()
            if BUG != "teacher_moves_before_update":
                move(teacher, student)
            if BUG == "teacher_moves_once_for_each_rank":
                for _ in range(WORLD - 1):
                    move(teacher, student)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
