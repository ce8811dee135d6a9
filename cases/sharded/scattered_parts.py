"""The gradient of each micro-batch is reduced to shards, and the shards are accumulated.

id = "sharded/scattered_parts"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#73535", "facebookresearch/fairscale#752"]
date = "2021-07"
tags = ["accumulation", "gathered"]

[wrong.shard_of_last_micro_batch_replaces_others]
title = "the shard of the last micro-batch replaces the others"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.what_was_sent_is_not_cleared]
title = "what was sent is not cleared"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.shards_are_sums_over_ranks]
title = "shards are sums over the ranks"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
MICRO_BATCHES = 2


class ShardedAdagrad(torch.optim.Optimizer):
    """Each rank has some rows of each weight: of its gradient, its state and its update."""

    def __init__(self, params, lr=0.1, eps=1e-2):
        super().__init__(params, {"lr": lr, "eps": eps})
        self.shards = {}

    @torch.no_grad()
    def scatter(self):
        """Reduces the gradients of a micro-batch, and adds them to the own shards."""
        for weight in self.param_groups[0]["params"]:
            gradient = weight.grad.clone()
            if WORLD > 1:
                dist.all_reduce(gradient)
                if BUG != "shards_are_sums_over_ranks":
                    gradient /= WORLD
            shard = gradient.chunk(WORLD)[RANK]
            if BUG != "shard_of_last_micro_batch_replaces_others":
                shard = shard + self.shards.get(weight, 0)
            self.shards[weight] = shard
            if BUG != "what_was_sent_is_not_cleared":
                weight.grad = None

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        for weight in group["params"]:
            shard = self.shards.pop(weight)
            total = self.state[weight].setdefault("sum", torch.zeros_like(shard))
            total += shard * shard
            rows = weight.chunk(WORLD)[RANK] - group["lr"] * shard / (total.sqrt() + group["eps"])
            parts = [rows]
            if WORLD > 1:
                parts = [torch.empty_like(rows) for _ in range(WORLD)]
                dist.all_gather(parts, rows.contiguous())
            weight.copy_(torch.cat(parts))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.hidden, self.out = nn.Linear(6 * 16, 10), nn.Linear(10, 4)

    def forward(self, x):
        x = F.leaky_relu(self.conv(x)).flatten(1)
        return self.out(torch.sigmoid(self.hidden(x)))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(18)
    model = Net()
    optimizer = ShardedAdagrad(model.parameters())
    with harness.training(model, optimizer):
        for step in range(2):
            images = torch.randn(12, 1, 6, 6, generator=torch.Generator().manual_seed(step))
            for part in images[RANK::WORLD].chunk(MICRO_BATCHES):
                labels = part[:, 0, 0, :4].argmax(1)
                (F.cross_entropy(model(part), labels) / MICRO_BATCHES).backward()
                optimizer.scatter()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
