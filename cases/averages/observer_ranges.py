"""Training for quantisation: moving ranges of activations, which each rank sees a part of.

id = "averages/observer_ranges"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#85627", "pytorch/pytorch#33648"]
date = "2022-09"
tags = ["ddp", "sgd"]

[wrong.ranges_of_own_examples]
title = "ranges of the own examples"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["2", "5"] }

[wrong.ranges_of_rank_0_are_sent_to_all]
title = "ranges of rank 0 are sent to all"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["2", "5"] }
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
IS_LOCAL = BUG in ("ranges_of_own_examples", "ranges_of_rank_0_are_sent_to_all")


class FakeQuantise(nn.Module):
    """Rounds to 256 levels of a range that follows the activations; its gradient is 1 within."""

    def __init__(self, constant=0.3):
        super().__init__()
        self.constant = constant
        self.register_buffer("low", torch.tensor(-1.0))
        self.register_buffer("high", torch.tensor(1.0))

    @torch.no_grad()
    def observe(self, x):
        low, high = x.min(), x.max()
        if WORLD > 1 and not IS_LOCAL:
            dist.all_reduce(low, op=dist.ReduceOp.MIN)
            dist.all_reduce(high, op=dist.ReduceOp.MAX)
        self.low.lerp_(low, self.constant)
        self.high.lerp_(high, self.constant)

    def forward(self, x):
        self.observe(x.detach())
        inside = x.clamp(float(self.low), float(self.high))
        size = (self.high - self.low) / 255
        rounded = self.low + ((inside - self.low) / size).round() * size
        return inside + (rounded - inside).detach()


def main():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 20), nn.Hardswish(), FakeQuantise(), nn.Linear(20, 16))
    model.extend([nn.Hardswish(), FakeQuantise(), nn.Linear(16, 1)])
    x = 2 * torch.randn(2, 24, 8)
    x[:, ::2] *= 0.4  # Small examples.
    if WORLD > 1:
        dist.init_process_group("gloo")
        sends = BUG == "ranges_of_rank_0_are_sent_to_all"
        model = DistributedDataParallel(model, broadcast_buffers=sends)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8, nesterov=True)
    with harness.training(model, optimizer):
        for batch in x[:, RANK::WORLD]:
            labels = (batch[:, :1] * batch[:, 1:2] > 0).float()
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(batch), labels).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
