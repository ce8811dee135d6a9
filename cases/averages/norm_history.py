"""Clipping by the history of the gradient's norm, which each rank takes from its own part.

id = "averages/norm_history"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["bluorion-com/ZClip#2", "arXiv:2504.02507"]
date = "2025-05"
tags = ["fsdp2", "embedding", "sgd"]

[wrong.norm_is_that_of_part]
title = "the norm is that of a part"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.norms_of_parts_are_averaged]
title = "norms of parts are averaged"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.history_counts_each_rank]
title = "the history counts each rank"
place = { node = "update", step = 0, ranks = "all", tensors = ["clip.mean"] }
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


class ZClip:
    """Scales gradients whose norm is far above its moving mean."""

    def __init__(self, mean=0.1, alpha=0.6):
        self.mean, self.alpha = mean, alpha

    def norm(self, grads):
        own = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        square = sum(g.square().sum() for g in own)
        if WORLD > 1 and BUG == "norms_of_parts_are_averaged":
            norm = square.sqrt() / WORLD
            dist.all_reduce(norm)
            return norm.item()
        if WORLD > 1 and BUG != "norm_is_that_of_part":
            dist.all_reduce(square)
        return square.sqrt().item()

    def step(self, weights):
        grads = [w.grad for w in weights]
        norm = self.norm(grads)
        scale = min(1.0, self.mean / norm)
        for grad in grads:
            grad.mul_(scale)
        for _ in range(WORLD if BUG == "history_counts_each_rank" else 1):
            self.mean += (1 - self.alpha) * (norm * scale**0.5 - self.mean)


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 12)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.head(x)


def main():
    torch.manual_seed(0)
    model = Net()
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
    optimizer, clip = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), ZClip()
    with harness.training(model, optimizer):
        for _ in range(3):
            tokens = torch.randint(12, (32, 2))[RANK::WORLD]
            loss = F.cross_entropy(model(tokens[:, 0]), tokens[:, 1])
            optimizer.zero_grad()
            loss.backward()
            clip.step(list(model.parameters()))
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
