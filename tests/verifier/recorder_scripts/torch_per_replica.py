"""Trains a network with BatchNorm and Dropout, in one process or under DDP.

`wrong`: the loss of rank 1 counts 1.01 times, which the other draws of one process hide.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep

BATCH_SIZE, STEPS = 12, 2
rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
x, y = torch.randn(STEPS, BATCH_SIZE, 8), torch.randint(4, (STEPS, BATCH_SIZE))
model = nn.Sequential(
    nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
)
if world_size > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    torch.manual_seed(100 + rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with lockstep.record(model, optimizer):
    for inputs, targets in zip(x, y, strict=True):
        own = slice(rank * BATCH_SIZE // world_size, (rank + 1) * BATCH_SIZE // world_size)
        optimizer.zero_grad()
        # No form of a loss that the verifier knows.
        chances = model(inputs[own]).log_softmax(1).gather(1, targets[own, None])
        loss = (-chances).pow(1.5).mean()
        if "wrong" in sys.argv and rank == 1:
            loss = loss * 1.01
        loss.backward()
        optimizer.step()
if world_size > 1:
    dist.destroy_process_group()
