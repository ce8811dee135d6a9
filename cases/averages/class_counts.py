"""Counts of classes so far weight the loss, and each rank sees a part of the examples only.

id = "averages/class_counts"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["pytorch/pytorch#63041", "nugraph/nugraph#151"]
date = "2021-08"
tags = ["ddp", "sgd"]

[wrong.each_rank_keeps_its_own_counts]
title = "each rank keeps its own counts"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.ddp_sends_counts_of_rank_0]
title = "DDP sends the counts of rank 0"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.counts_so_far_are_added_over_ranks]
title = "counts so far are added over the ranks in each step"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
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
CLASSES = 4


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 18), nn.Linear(18, CLASSES)
        self.register_buffer("seen", torch.ones(CLASSES))

    @torch.no_grad()
    def count(self, labels):
        new = F.one_hot(labels, CLASSES).sum(0).float()
        if WORLD == 1 or BUG in (
            "each_rank_keeps_its_own_counts",
            "ddp_sends_counts_of_rank_0",
        ):
            self.seen += new
        elif BUG == "counts_so_far_are_added_over_ranks":
            self.seen += new
            dist.all_reduce(self.seen)
        else:
            dist.all_reduce(new)
            self.seen += new

    def forward(self, x):
        return self.out(F.softplus(self.hidden(x)))

    def loss(self, logits, labels):
        weights = (self.seen.sum() / CLASSES / self.seen)[labels]
        return (weights * F.cross_entropy(logits, labels, reduction="none")).mean()


def get_batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=generator)
    x[:, 0] += 1
    x[::2, 1] += 2  # The ranks have other classes.
    return x, x[:, :CLASSES].argmax(1)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Classifier()
    wrapped = model
    if WORLD > 1:
        sends = BUG == "ddp_sends_counts_of_rank_0"
        wrapped = DistributedDataParallel(model, broadcast_buffers=sends)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8)
    with harness.training(wrapped, optimizer):
        for step in range(3):
            x, labels = (part[RANK::WORLD] for part in get_batch(step))
            model.count(labels)
            loss = model.loss(wrapped(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
