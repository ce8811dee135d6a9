"""Norms of the shards of gradients are rounded to 16 bits before they are added up.

id = "precision/norms_of_shards"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["facebookresearch/fairscale#263", "facebookresearch/fairscale#1092"]
date = "2020-12"
tags = ["fsdp2", "low_precision", "sgd"]

[wrong.norms_of_shards_are_sent_in_bfloat16]
title = "norms of shards are sent in bfloat16"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.squares_are_added_in_float16]
title = "squares are added in float16"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, FEATURES, LIMIT = 16, 6, 3.0


class Regression(nn.Module):
    """Predicts sums in units that make gradients large."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 24), nn.Linear(24, 10)
        self.last = nn.Linear(10, 1)

    def forward(self, x):
        return 40 * self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def clip(model):
    """Scales all gradients, so that the norm of all shards is at most the limit."""
    grads = [weight.grad for weight in model.parameters()]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    norm = torch.stack([grad.norm() for grad in local]).norm()
    if BUG == "squares_are_added_in_float16":
        square = norm.half() ** 2
    elif BUG == "norms_of_shards_are_sent_in_bfloat16":
        square = norm.bfloat16() ** 2
    else:
        square = norm**2
    if WORLD > 1:
        dist.all_reduce(square)
    factor = (LIMIT / square.float().sqrt()).clamp(max=1)
    for grad in local:
        grad.mul_(factor)


def main():
    torch.manual_seed(14)
    model = Regression()
    if WORLD > 1:
        dist.init_process_group("gloo")
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, FEATURES, generator=torch.Generator().manual_seed(step))
            own = x[RANK::WORLD]
            loss = nn.functional.mse_loss(model(own), 90 * own.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            clip(model)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
