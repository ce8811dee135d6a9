"""One rank has fewer batches and joins; the gradient is then divided by all ranks.

id = "data/uneven_join"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#42577", "pytorch/pytorch#38174"]
date = "2020-08"
tags = ["ddp", "sgd"]

[wrong.divided_by_first_number_of_ranks]
title = "divided by the first number of ranks"
place = { node = "sum", step = 1, ranks = [0], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.l1_loss(model(x), y).backward()
        optimizer.step()


torch.manual_seed(7)
x = torch.randn(12, 4)
y = x.prod(1, keepdim=True)
model = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 1))
if WORLD > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# The global batches have 8 and 4 examples; rank 0 has the second alone.
parts = [slice(0, 8), slice(8, 12)]
if WORLD > 1:
    parts = [slice(0, 4), slice(8, 12)] if RANK == 0 else [slice(4, 8)]
batches = [(x[part], y[part]) for part in parts]
with harness.training(model, optimizer):
    if WORLD > 1:
        by_all = BUG == "divided_by_first_number_of_ranks"
        with model.join(divide_by_initial_world_size=by_all):
            train(model, optimizer, batches)
    else:
        train(model, optimizer, batches)
if WORLD > 1:
    dist.destroy_process_group()
