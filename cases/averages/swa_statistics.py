"""Stochastic weight averaging: statistics of the averaged model come from one rank's examples.

id = "averages/swa_statistics"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["timgaripov/swa#22", "pytorch/pytorch#59363"]
date = "2021-02"
tags = ["ddp", "averages", "sgd"]

[wrong.statistics_of_own_part]
title = "statistics of the own part"
place = { node = "update", step = 0, ranks = "all", tensors = [
    "average.module.mean",
    "average.module.var",
] }

[wrong.statistics_of_rank_0]
title = "statistics of rank 0"
place = { node = "update", step = 0, ranks = "all", tensors = [
    "average.module.mean",
    "average.module.var",
] }

[wrong.average_starts_step_late]
title = "the average starts a step late"
place = { node = "update", step = 0, ranks = "all", tensors = ["average.*"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Net(nn.Module):
    """Normalises features by statistics that are set between steps."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 10), nn.Linear(10, 2)
        self.register_buffer("mean", torch.zeros(10))
        self.register_buffer("var", torch.ones(10))

    def features(self, x):
        return torch.tanh(self.body(x))

    def forward(self, x):
        return self.head((self.features(x) - self.mean) * (self.var + 1e-3).rsqrt())


@torch.no_grad()
def set_statistics(net, examples):
    features = net.features(examples)
    moments = torch.stack([features.mean(0), features.square().mean(0)])
    if WORLD > 1 and BUG == "statistics_of_rank_0":
        dist.broadcast(moments, 0)
    elif WORLD > 1 and BUG != "statistics_of_own_part":
        dist.all_reduce(moments)
        moments /= WORLD
    net.mean.copy_(moments[0])
    net.var.copy_(moments[1] - moments[0] ** 2)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net, forward_sync_buffers=False) if WORLD > 1 else net
    average = AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, weight_decay=1e-3)
    schedule = SWALR(optimizer, swa_lr=0.1, anneal_epochs=2)
    examples = (torch.randn(24, 5) + torch.linspace(-1, 1, 24)[:, None]).chunk(WORLD)[RANK]
    with harness.training(model, optimizer, others={"average": average}):
        for step in range(2):
            x = examples[step::2]
            loss = F.cross_entropy(model(x), (x[:, 0] > x[:, 1]).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step or BUG != "average_starts_step_late":
                average.update_parameters(net)
            set_statistics(average.module, examples)
    if WORLD > 1:
        dist.destroy_process_group()


main()
