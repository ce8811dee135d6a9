"""The distributed sampler is not told the number of the epoch, so its order stays the same.

id = "data/set_epoch_missing"
framework = "torch"
processes = 2
steps = 4
mode = "pair"
references = ["pytorch/pytorch#31771", "Lightning-AI/pytorch-lightning#224"]
date = "2020-01"
tags = ["ddp", "loader", "sgd"]

[wrong.no_set_epoch]
title = "no set_epoch"
place = { node = "examples", step = 2, ranks = "all", tensors = "all" }

[wrong.set_epoch_on_rank_0_only]
title = "set_epoch on rank 0 only"
place = { node = "examples", step = 2, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

torch.manual_seed(2)
images = torch.randn(16, 1, 8, 8)
labels = (images[:, 0, :4].sum((1, 2)) > images[:, 0, 4:].sum((1, 2))).long()
model = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 2)
)
if WORLD > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
data = TensorDataset(images, labels)
sampler = DistributedSampler(data, WORLD, RANK, seed=5)
loader = DataLoader(data, batch_size=8 // WORLD, sampler=sampler)
with harness.training(model, optimizer):
    for epoch in range(2):
        if BUG == "set_epoch_on_rank_0_only":
            sampler.set_epoch(epoch if RANK == 0 else 0)
        elif BUG != "no_set_epoch":
            sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
