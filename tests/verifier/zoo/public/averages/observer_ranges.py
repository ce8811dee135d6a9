"""Training for quantisation: moving ranges of activations, which each rank sees a part of.

reference = "pytorch/pytorch#85627, pytorch/pytorch#33648"
date = "2022-09"
framework = "torch"

[wrong]
"ranges of the own examples" = ["diverged_replicas", "other_statistics"]
"ranges of rank 0 are sent to all" = ["other_statistics", "diverged_replicas"]
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
IS_LOCAL = BUG in ("ranges of the own examples", "ranges of rank 0 are sent to all")


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
        sends = BUG == "ranges of rank 0 are sent to all"
        model = DistributedDataParallel(model, broadcast_buffers=sends)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8, nesterov=True)
    with lockstep.record(model, optimizer):
        for batch in x[:, RANK::WORLD]:
            labels = (batch[:, :1] * batch[:, 1:2] > 0).float()
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(batch), labels).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
