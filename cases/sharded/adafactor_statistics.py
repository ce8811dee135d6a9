"""Adafactor keeps means over rows and columns, and a norm, that shards must make together.

id = "sharded/adafactor_statistics"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["hpcaitech/ColossalAI#5484", "pytorch/pytorch#109581"]
date = "2024-03"
tags = ["fsdp2", "embedding"]

[wrong.column_means_are_those_of_own_rows]
title = "the column means are those of the own rows"
place = { node = "update", step = 0, ranks = "all", tensors = ["0.weight", "2.weight", "4.weight"] }

[wrong.update_root_mean_square_is_that_of_shard]
title = "the update's root mean square is that of the shard"
place = { node = "update", step = 0, ranks = "all", tensors = ["0.weight", "2.weight", "4.weight"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def whole(tensor):
    """The mean of all ranks, where a reduction left one for each."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()])


def column_means(square):
    if WORLD > 1 and BUG == "column_means_are_those_of_own_rows":
        means = square.to_local().mean(0)
        return DTensor.from_local(means, square.device_mesh, [Replicate()])
    return whole(square.mean(0))


def root_mean_square(update):
    if WORLD > 1 and BUG == "update_root_mean_square_is_that_of_shard":
        return update.to_local().square().mean().sqrt()
    mean = whole(update.square().mean())
    return (mean.to_local() if isinstance(mean, DTensor) else mean).sqrt()


class Adafactor(torch.optim.Optimizer):
    def __init__(self, params, lr=0.03, decay=0.8, threshold=0.5):
        super().__init__(params, {"lr": lr, "decay": decay, "threshold": threshold})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                update = self.factored(p) if p.ndim == 2 else self.unfactored(p)
                size = float(root_mean_square(update)) / group["threshold"]
                p.sub_(update * (group["lr"] / max(1.0, size)))

    def average(self, p, name, value):
        state, decay = self.state[p], self.param_groups[0]["decay"]
        old = state.get(name)
        state[name] = value if old is None else decay * old + (1 - decay) * value
        return state[name]

    def factored(self, p):
        square = p.grad * p.grad + 1e-8
        rows = self.average(p, "row", square.mean(1))
        columns = self.average(p, "column", column_means(square))
        mean = whole(rows.mean())
        return p.grad / (rows / mean).sqrt().unsqueeze(1) / columns.sqrt().unsqueeze(0)

    def unfactored(self, p):
        return p.grad / self.average(p, "square", p.grad * p.grad + 1e-8).sqrt()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Flatten(), nn.Linear(24, 16), nn.GELU())
    model.append(nn.Linear(16, 12))
    if WORLD > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = Adafactor(model.parameters())
    with harness.training(model, optimizer):
        for step in range(2):
            tokens = torch.randint(12, (32, 4), generator=torch.Generator().manual_seed(step))
            own = tokens[RANK::WORLD]
            nn.functional.cross_entropy(model(own[:, :3]), own[:, 3]).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
