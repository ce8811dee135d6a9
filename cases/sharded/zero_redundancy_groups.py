"""ZeroRedundancyOptimizer got its second group of parameters, and its schedule, in another way.

id = "sharded/zero_redundancy_groups"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#59973", "pytorch/pytorch#51601"]
date = "2021-06"
tags = ["ddp", "zero", "adam"]

[wrong.second_group_has_decay_of_first]
title = "the second group has the decay of the first"
place = { node = "update", step = 0, ranks = "all", tensors = [
    "conv.bias",
    "norm.weight",
    "head.bias",
] }

[wrong.schedule_is_that_of_inner_optimizer]
title = "the schedule is that of the inner optimizer"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }

[wrong.model_is_not_wrapped_in_ddp]
title = "the model is not wrapped in DDP"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DECAY = 0.3


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.head = nn.Linear(6 * 16, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(nn.functional.max_pool2d(x, 2).flatten(1))


def groups_of(model):
    named = list(model.named_parameters())
    decayed = [p for name, p in named if p.ndim > 1]
    return decayed, [p for name, p in named if p.ndim <= 1]


def create_optimizer(model):
    decayed, others = groups_of(model)
    if WORLD == 1:
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.02, weight_decay=DECAY)
    optimizer = ZeroRedundancyOptimizer(decayed, torch.optim.AdamW, lr=0.02, weight_decay=DECAY)
    if BUG == "second_group_has_decay_of_first":
        optimizer.add_param_group({"params": others})
    else:
        optimizer.add_param_group({"params": others, "weight_decay": 0.0})
    return optimizer


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Classifier()
    nn.init.normal_(model.conv.bias)
    if WORLD > 1 and BUG != "model_is_not_wrapped_in_ddp":
        model = DistributedDataParallel(model)
    optimizer = create_optimizer(model)
    scheduled = optimizer
    if WORLD > 1 and BUG == "schedule_is_that_of_inner_optimizer":
        scheduled = optimizer.optim
    schedule = torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: 1.0 / (step + 2))
    images, labels = torch.randn(2, 12, 1, 8, 8), torch.randint(5, (2, 12))
    with harness.training(model, optimizer):
        for x, y in zip(images, labels, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD])
            loss.backward()
            optimizer.step()
            schedule.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
