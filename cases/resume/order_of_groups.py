"""Groups of weights are created in another order than in the saved optimizer, which has no names.

id = "resume/order_of_groups"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["pytorch/pytorch#1489"]
date = "2017-05"
tags = ["ddp", "adam"]

[wrong.groups_in_another_order]
title = "groups in another order"
place = { node = "start", step = 2, ranks = "all", tensors = "all" }

[wrong.weights_in_another_order]
title = "weights in another order"
place = { node = "start", step = 2, ranks = "all", tensors = "all" }
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
STEPS, HALF, BATCH, WIDTH = 4, 2, 8, 10


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.item = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, queries, items):
        return (self.query(queries) * self.item(items)).sum(1)


def create_optimizer(model):
    query, item = list(model.query.parameters()), list(model.item.parameters())
    if LOAD and BUG == "weights_in_another_order":
        query, item = query[2:] + query[:2], item[2:] + item[:2]
    groups = [
        {"params": query, "lr": 0.02, "weight_decay": 0.0},
        {"params": item, "lr": 0.04, "weight_decay": 0.3},
    ]
    if LOAD and BUG == "groups_in_another_order":
        groups.reverse()
    return torch.optim.AdamW(groups, eps=1e-3)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(23)
    model = TwoTowers()
    optimizer = create_optimizer(model)
    if LOAD:
        state = torch.load(LOAD + ".pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    with harness.training(ddp, optimizer):
        for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
            data = torch.Generator().manual_seed(step)
            queries, items = torch.randn(2, BATCH, WIDTH, generator=data)
            clicks = ((queries * items).sum(1) > 0).float()[RANK::WORLD]
            optimizer.zero_grad()
            scores = ddp(queries[RANK::WORLD], items[RANK::WORLD])
            nn.functional.binary_cross_entropy_with_logits(scores, clicks).backward()
            optimizer.step()
    if SAVE and RANK == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, SAVE + ".pt")
    if WORLD > 1:
        dist.destroy_process_group()


main()
