"""D-adaptation estimates the learning rate from sums over all weights, which are sharded.

id = "sharded/distance_of_shards"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["facebookresearch/dadaptation#19"]
date = "2023-04"
tags = ["fsdp2", "embedding"]

[wrong.sums_are_those_of_own_shards]
title = "sums are those of the own shards"
place = { node = "update", step = 1, ranks = "all", tensors = "all" }

[wrong.only_one_of_two_sums_is_added_over_ranks]
title = "only one of two sums is added over the ranks"
place = { node = "update", step = 1, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reduced(sums):
    if WORLD > 1 and BUG == "only_one_of_two_sums_is_added_over_ranks":
        dist.all_reduce(sums[:1])
    elif WORLD > 1 and BUG != "sums_are_those_of_own_shards":
        dist.all_reduce(sums)
    return sums.tolist()


class DAdaptSGD(torch.optim.Optimizer):
    """The step size is `d`, which grows as gradients keep their direction."""

    def __init__(self, params, lr=1.0, d=0.01):
        super().__init__(params, {"lr": lr, "d": d, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        size = group["d"] * group["lr"]
        sums = torch.zeros(2)
        for p in group["params"]:
            gradient = local(p.grad)
            total = local(self.state[p].setdefault("s", torch.zeros_like(p)))
            sums[0] += size * (gradient * total).sum()
            total.add_(gradient, alpha=size)
            sums[1] += total.square().sum()
        product, square = reduced(sums)
        group["numerator"] += product
        group["d"] = max(group["d"], 2 * group["numerator"] / square**0.5)
        for p in group["params"]:
            local(p).sub_(local(p.grad), alpha=group["d"] * group["lr"])


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(64)
    layers = [nn.Embedding(10, 6), nn.Flatten(), nn.Linear(18, 14), nn.SELU(), nn.Linear(14, 1)]
    model = nn.Sequential(*layers)
    if WORLD > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = DAdaptSGD(model.parameters())
    with harness.training(model, optimizer):
        for step in range(3):
            tokens = torch.randint(10, (16, 3), generator=torch.Generator().manual_seed(step))
            own = tokens[RANK::WORLD]
            optimizer.zero_grad()
            F.huber_loss(model(own)[:, 0], own.sum(1).float(), delta=2.0).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
