"""Each rank looks for overflow in its own part of the gradients only, and so skips alone.

id = "precision/overflow_on_one_rank"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["pytorch/pytorch#115710", "pytorch/pytorch#64632"]
date = "2023-12"
tags = ["low_precision", "adam"]

[wrong.each_rank_looks_at_its_own_part]
title = "each rank looks at its own part"
place = { node = "update", step = 0, ranks = [1], tensors = ["2.*"] }

[wrong.ranks_agree_by_minimum]
title = "the ranks agree by the minimum"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }

[wrong.rank_0_keeps_its_loss_scale]
title = "rank 0 keeps its loss scale"
place = { node = "update", step = 0, ranks = [0], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
GLOBAL_BATCH_SIZE = 8


class ShardedScaler(torch.amp.GradScaler):
    """Skips a step on all ranks if one of them found an overflow."""

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        if WORLD == 1 or BUG == "each_rank_looks_at_its_own_part":
            return
        found = next(iter(self._found_inf_per_device(optimizer).values()))
        minimum = BUG == "ranks_agree_by_minimum"
        dist.all_reduce(found, op=dist.ReduceOp.MIN if minimum else dist.ReduceOp.MAX)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(GLOBAL_BATCH_SIZE, 8, generator=generator)
    y = x[:, :2] - x[:, 2:4]
    if step == 0:
        x[3, 0] = 3000.0  # The gradient of the first layer overflows.
    return x[RANK::WORLD], y[RANK::WORLD]


def main():
    torch.manual_seed(0)
    if WORLD > 1:
        dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 2))
    model[0].weight.data[:, 0] = 0  # Large inputs do not saturate the first layer.
    # Each rank updates one of the two layers.
    layers = {0: [model[0]], 1: [model[2]]} if WORLD > 1 else {0: [model[0], model[2]]}
    owned = [weight for layer in layers[RANK] for weight in layer.parameters()]
    optimizer = torch.optim.Adam(owned, lr=0.01)
    scaler = ShardedScaler("cpu", init_scale=2.0**13)
    with harness.training(model, optimizer):
        for step in range(3):
            x, y = batch(step)
            with torch.autocast("cpu", dtype=torch.float16):
                output = model(x)
            loss = (output.float() - y).square().sum() / GLOBAL_BATCH_SIZE
            scaler.scale(loss).backward()
            if WORLD > 1:
                for weight in model.parameters():
                    dist.all_reduce(weight.grad)
            scaler.step(optimizer)
            kept = BUG == "rank_0_keeps_its_loss_scale" and RANK == 0
            scaler.update(2.0**13 if kept else None)
            for rank in layers if WORLD > 1 else ():
                for layer in layers[rank]:
                    for weight in layer.parameters():
                        dist.broadcast(weight.data, rank)
            model.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


main()
