"""The hardest triplets of a batch are those of all ranks, and only own embeddings have gradients.

id = "gathered/hard_triplets"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "JDAI-CV/fast-reid#458",
    "ShiqiYu/OpenGait#36",
    "KevinMusgrave/pytorch-metric-learning#363",
]
date = "2021-04"
tags = ["ddp", "gathered", "sgd"]

[wrong.triplets_are_mined_on_each_rank]
title = "triplets are mined on each rank"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.factor_of_ranks_is_missing]
title = "the factor of the ranks is missing"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PEOPLE, PICTURES, MARGIN = 4, 4, 1.0


class ReID(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 8, 3, stride=2)
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(8, 8)

    def forward(self, pictures):
        x = F.relu(self.conv1(pictures))
        return self.head(F.relu(self.norm(self.conv2(x))).mean((2, 3)))


def gather(x):
    """Returns the tensors of all ranks; that of this rank keeps its graph."""
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(parts, x.detach())
    parts[RANK] = x
    return torch.cat(parts)


def triplet_loss(embeddings, people):
    distances = (embeddings[:, None] - embeddings[None]).square().sum(-1).add(1e-6).sqrt()
    same = people[:, None] == people
    farthest = distances.masked_fill(~same, 0.0).max(1).values
    nearest = distances.masked_fill(same, float("inf")).min(1).values
    return F.relu(farthest - nearest + MARGIN).mean()


def loss_of(embeddings, people):
    if WORLD == 1 or BUG == "triplets_are_mined_on_each_rank":
        return triplet_loss(embeddings, people)
    loss = triplet_loss(gather(embeddings), gather(people))
    return loss if BUG == "factor_of_ranks_is_missing" else WORLD * loss


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = ReID()
people = torch.arange(PEOPLE).repeat_interleave(PICTURES)
pictures = torch.randn(2, len(people), 1, 9, 9) + people.view(-1, 1, 1, 1) / 4
if WORLD > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
with harness.training(model, optimizer):
    for step in range(2):
        optimizer.zero_grad()
        embeddings = model(pictures[step, RANK::WORLD])
        loss_of(embeddings, people[RANK::WORLD]).backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
