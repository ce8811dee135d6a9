"""Centres of classes move towards the features of their class, on each rank by its own.

id = "averages/center_loss"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["deeplearning4j/deeplearning4j#6624", "EncodeTS/TensorFlow_Center_Loss#2"]
date = "2018-10"
tags = ["ddp", "sgd"]

[wrong.centres_follow_own_features]
title = "centres follow the own features"
place = { node = "update", step = 0, ranks = "all", tensors = ["centers"] }

[wrong.changes_of_ranks_are_all_added]
title = "changes of the ranks are all added"
place = { node = "update", step = 0, ranks = "all", tensors = ["centers"] }

[wrong.changes_are_averaged_with_counts]
title = "changes are averaged, with counts of each rank"
place = { node = "update", step = 0, ranks = "all", tensors = ["centers"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CLASSES, WIDTH = 4, 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        features = self.body(x)
        return features, self.head(features)


@torch.no_grad()
def move(centers, features, y, rate=0.5):
    """Moves each centre by rate · Σ (features − centre) / (1 + number of examples)."""
    chosen = F.one_hot(y, CLASSES).float()
    counts = chosen.sum(0)[:, None]
    sums = chosen.T @ features - counts * centers
    change = sums / (1 + counts)
    if BUG == "changes_of_ranks_are_all_added":
        dist.all_reduce(change)
        centers += rate * change
        return
    if BUG == "changes_are_averaged_with_counts":
        dist.all_reduce(change)
        centers += rate * change / WORLD
        return
    if WORLD > 1 and BUG != "centres_follow_own_features":
        dist.all_reduce(sums)
        dist.all_reduce(counts)
    centers += rate * sums / (1 + counts)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(6)
    net, centers = Net(), torch.randn(CLASSES, WIDTH)
    model = DistributedDataParallel(net) if WORLD > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    with harness.training(model, optimizer, others={"centers": {"centers": centers}}):
        for _ in range(2):
            x, y = torch.randn(20, 1, 6, 6), torch.randint(CLASSES, (20,)).sort().values
            x, y = x.chunk(WORLD)[RANK], y.chunk(WORLD)[RANK]
            features, logits = model(x)
            loss = F.cross_entropy(logits, y) + 0.1 * F.mse_loss(features, centers[y])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            move(centers, features, y)
    if WORLD > 1:
        dist.destroy_process_group()


main()
