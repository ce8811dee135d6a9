"""Features are gathered as a DTensor, whose gradient is a sum of the parts that ranks compute.

id = "gathered/supervised_contrast"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#153016", "HobbitLong/SupContrast#26"]
date = "2025-05"
tags = ["ddp", "gathered", "adam"]

[wrong.gradient_is_taken_as_equal_on_all_ranks]
title = "the gradient is taken as equal on all ranks"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.own_labels_stand_for_those_of_others]
title = "the own labels stand for those of others"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CLASSES, TEMPERATURE = 3, 0.3


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.attend = nn.Linear(5, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.project = nn.Linear(16, 8)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return F.normalize(self.project(x.mean(1)), dim=-1)


class SupConLoss:
    """Pulls together examples of one class, of all ranks."""

    def __init__(self, mesh):
        self.mesh = mesh

    def gather(self, x, partial):
        parts = DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)
        return parts.full_tensor(grad_placements=[Partial()] if partial else None)

    def __call__(self, z, labels):
        all_z, all_labels, first = z, labels, RANK * len(z)
        if WORLD > 1:
            all_z = self.gather(z, partial=BUG != "gradient_is_taken_as_equal_on_all_ranks")
            all_labels = self.gather(labels, partial=False)
        if BUG == "own_labels_stand_for_those_of_others":
            all_labels = labels.repeat(WORLD)
        own = torch.arange(len(z))[:, None] + first == torch.arange(len(all_z))
        logits = (z @ all_z.T / TEMPERATURE).masked_fill(own, -1e9)
        positives = (labels[:, None] == all_labels) & ~own
        sums = (logits.log_softmax(1) * positives).sum(1)
        return -(sums / positives.sum(1).clamp(min=1)).mean()


def main():
    mesh = None
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(2)
    model, criterion = Encoder(), SupConLoss(mesh)
    x = torch.randn(2, 12, 4, 5)
    labels = torch.randint(CLASSES, (2, 12))
    if WORLD > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-4)
    with harness.training(model, optimizer):
        for step in range(2):
            optimizer.zero_grad()
            z = model(x[step, RANK::WORLD])
            criterion(z, labels[step, RANK::WORLD]).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
