"""A running average of weights divides by how many it has, and is set back while rates warm up.

id = "averages/count_of_averages"
framework = "torch"
processes = 2
steps = 4
mode = "pair"
references = ["pytorch/vision#4544"]
date = "2021-10"
tags = ["ddp", "averages", "sgd"]

[wrong.count_is_set_back_in_each_step]
title = "the count is set back in each step"
place = { node = "update", step = 2, ranks = "all", tensors = ["average.*"] }

[wrong.count_is_never_set_back]
title = "the count is never set back"
place = { node = "update", step = 1, ranks = "all", tensors = ["average.*"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WARMUP, STEPS = 2, 4


def sets_back(step):
    """Whether the average becomes a copy of the weights: it starts after the warm-up."""
    if BUG == "count_is_never_set_back":
        return False
    return step < WARMUP or BUG == "count_is_set_back_in_each_step"


def main():
    torch.manual_seed(36)
    network = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU6(), nn.AvgPool2d(2), nn.Flatten())
    network.append(nn.Linear(24, 5))
    average = AveragedModel(network)
    model = network
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.4, total_iters=WARMUP)
    with harness.training(model, optimizer, others={"average": average}):
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            images = torch.randn(20, 1, 7, 7, generator=generator)[RANK::WORLD]
            labels = images.flatten(1)[:, :5].argmax(1)
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
            optimizer.step()
            schedule.step()
            if sets_back(step):
                average.n_averaged.fill_(0)
            average.update_parameters(network)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
