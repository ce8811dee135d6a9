"""With replicas of shards, the seed of the noise follows only one of the two axes of ranks.

id = "random/noise_of_replicas"
framework = "torch"
processes = 4
steps = 2
mode = "pair"
references = ["pytorch/torchtitan#1946"]
date = "2025-10"
tags = ["fsdp2", "adam"]

[wrong.replicas_of_shard_have_same_noise]
title = "replicas of a shard have the same noise"
place = { node = "random", step = 0, ranks = [2, 3], tensors = "all" }

[wrong.ranks_of_replica_have_same_noise]
title = "ranks of a replica have the same noise"
place = { node = "random", step = 0, ranks = [1, 2, 3], tensors = "all" }
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
BATCH_SIZE, SIZE = 8, 6


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.time = nn.Linear(SIZE, 16), nn.Linear(1, 16)
        self.leave = nn.Linear(16, SIZE)

    def forward(self, x, time):
        return self.leave(torch.tanh(self.enter(x) + self.time(time)))


def draw_noise(step):
    """Returns noise and times of the own examples."""
    generator = torch.Generator().manual_seed(700 + step)
    noise = torch.randn(BATCH_SIZE, SIZE, generator=generator)
    time = torch.rand(BATCH_SIZE, 1, generator=generator)
    place = RANK
    if BUG == "replicas_of_shard_have_same_noise":
        place = RANK % 2
    elif BUG == "ranks_of_replica_have_same_noise":
        place = RANK // 2
    return noise.chunk(WORLD)[place], time.chunk(WORLD)[place]


def main():
    torch.manual_seed(5)
    flow = Flow()
    if WORLD > 1:
        dist.init_process_group("gloo")
        names = ("dp_replicate", "dp_shard")
        fully_shard(flow, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
    optimizer = torch.optim.AdamW(flow.parameters(), lr=0.01, eps=1e-3)
    with harness.training(flow, optimizer):
        for step in range(2):
            data = torch.randn(BATCH_SIZE, SIZE, generator=torch.Generator().manual_seed(step))
            data = data.chunk(WORLD)[RANK]
            noise, time = draw_noise(step)
            velocity = flow((1 - time) * data + time * noise, time)
            (velocity - (noise - data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


main()
