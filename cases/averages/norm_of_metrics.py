"""A network with BatchNorm, whose statistics are those of each rank, is evaluated in each step."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def own(x):
    return x.chunk(WORLD)[RANK]


def wrap(model, **options):
    return DistributedDataParallel(model, **options) if WORLD > 1 else model


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(53)
    net = nn.Sequential(
        nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6, 4)
    )
    model, optimizer = wrap(net), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    held_out = torch.randn(16, 3, 8, generator=torch.Generator().manual_seed(99)) + 1
    with harness.training(model, optimizer):
        for step in range(3):
            x = own(torch.randn(16, 3, 8, generator=torch.Generator().manual_seed(step)))
            optimizer.zero_grad()
            F.cross_entropy(model(x), x.mean((1, 2)).gt(0).long()).backward()
            optimizer.step()
            if BUG != "metrics_move_the_statistics":
                net.eval()
            with torch.no_grad():
                net(own(held_out)).argmax(1)
            if BUG != "stays_in_evaluation_mode":
                net.train()
    if WORLD > 1:
        dist.destroy_process_group()


main()
