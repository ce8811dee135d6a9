"""With hybrid sharding, the norm of the gradients is added up over replicas, too.

id = "sharded/hsdp_grad_norm"
framework = "torch"
processes = 4
steps = 2
mode = "pair"
references = ["ByteDance-Seed/VeOmni#184"]
date = "2025-11"
tags = ["fsdp2", "clipping", "sgd"]

[wrong.squares_are_summed_over_all_ranks]
title = "the squares are summed over all ranks"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.each_rank_clips_by_its_own_shards]
title = "each rank clips by its own shards"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
MAX_NORM = 0.1


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.LayerNorm(16))
        self.second = nn.Linear(16, 3)

    def forward(self, x):
        return self.second(self.first(x))


def clip_gradients(model, mesh):
    if mesh is None:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        return
    parts = [p.grad.to_local() for p in model.parameters()]
    total = sum(part.square().sum() for part in parts)
    if BUG == "squares_are_summed_over_all_ranks":
        dist.all_reduce(total)
    elif BUG != "each_rank_clips_by_its_own_shards":
        dist.all_reduce(total, group=mesh["dp_shard"].get_group())
    factor = (MAX_NORM / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for part in parts:
        part.mul_(factor)


def main():
    mesh = None
    if WORLD > 1:
        dist.init_process_group("gloo")
        names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=names)
    torch.manual_seed(0)
    model = Mixer()
    if mesh is not None:
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    inputs, targets = torch.randn(2, 16, 10), torch.randint(3, (2, 16))
    with harness.training(model, optimizer):
        for x, y in zip(inputs, targets, strict=True):
            loss = nn.functional.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD])
            loss.backward()
            clip_gradients(model, mesh)
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
