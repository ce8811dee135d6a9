"""Each rank keeps a loss scale of its own, as its history of overflows differs.

id = "averages/loss_scale_history"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["pytorch/pytorch#136009", "pytorch/pytorch#90057"]
date = "2024-09"
tags = ["ddp", "sgd"]

[wrong.each_rank_looks_at_its_own_losses]
title = "each rank looks at its own losses"
place = { node = "update", step = 0, ranks = [1], tensors = ["scale.value"] }

[wrong.one_rank_started_with_another_scale]
title = "one rank started with another scale"
place = { node = "start", step = 0, ranks = [1], tensors = ["scale.value"] }
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
LIMIT = 30000.0


class Scale:
    """Halves after a large loss of any example, and doubles otherwise."""

    def __init__(self):
        self.value = 1024.0
        if RANK and BUG == "one_rank_started_with_another_scale":
            self.value = 512.0

    def update(self, losses):
        largest = losses.detach().max() * self.value
        if WORLD > 1 and BUG != "each_rank_looks_at_its_own_losses":
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        self.value *= 0.5 if largest > LIMIT else 2.0


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 12), nn.Softplus(), nn.Linear(12, 1))
    model = DistributedDataParallel(net) if WORLD > 1 else net
    optimizer, scale = torch.optim.SGD(net.parameters(), lr=0.01), Scale()
    with harness.training(model, optimizer):
        for _ in range(3):
            x = torch.randn(16, 5)
            y = torch.cat([torch.full((8, 1), 9.0), torch.zeros(8, 1)])
            x, y = x.chunk(WORLD)[RANK], y.chunk(WORLD)[RANK]
            losses = F.mse_loss(model(x), y, reduction="none")
            optimizer.zero_grad()
            (losses.mean() * scale.value).backward()
            for weight in net.parameters():
                weight.grad /= scale.value
            scale.update(losses)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
