"""A weight is taken by `to_local()` without the placements of its gradient: no sum is made.

id = "sharded/to_local_placements"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/torchtitan#2532", "pytorch/torchtitan#1805"]
date = "2026-03"
tags = ["experts", "embedding"]

[wrong.gradient_of_norm_is_of_own_tokens]
title = "the gradient of the norm is of the own tokens"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["norm.weight"] }

[wrong.gradient_of_experts_input_is_not_summed]
title = "the gradient of the experts' input is not summed"
place = { node = "gradient", step = 0, ranks = "all", tensors = [
    "embedding.weight",
    "norm.weight",
] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
WORLD = int(os.environ.get("WORLD_SIZE", 1))
COPY, SUMMAND, SEQUENCE = [Replicate()], [Partial()], [Shard(1)]


class Norm(nn.Module):
    """RMSNorm of the own part of each sequence; its weight is stored in parts."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x):
        weight = self.weight
        if isinstance(weight, DTensor):
            weight = weight.redistribute(placements=COPY)
            if BUG == "gradient_of_norm_is_of_own_tokens":
                weight = weight.to_local()
            else:
                weight = weight.to_local(grad_placements=SUMMAND)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


class FeedForward(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(hidden, width) * 0.4)
        self.w2 = nn.Parameter(torch.randn(width, hidden) * 0.4)

    def forward(self, x):
        w1, w2 = self.w1, self.w2
        if not isinstance(w1, DTensor):
            return torch.relu(x @ w1.T) @ w2.T
        mesh = w1.device_mesh
        x = DTensor.from_local(x, mesh, COPY)
        if BUG == "gradient_of_experts_input_is_not_summed":
            x = x.to_local()
        else:
            x = x.to_local(grad_placements=SUMMAND)
        y = torch.relu(x @ w1.to_local().T) @ w2.to_local().T
        return DTensor.from_local(y, mesh, SUMMAND).redistribute(placements=COPY).to_local()


class Model(nn.Module):
    def __init__(self, mesh=None, width=8):
        super().__init__()
        self.mesh = mesh
        self.embedding = nn.Embedding(15, width)
        self.norm = Norm(width)
        self.feed_forward = FeedForward(width, 16)
        self.head = nn.Linear(width, 15)
        if mesh is not None:
            self.split(self.norm, "weight", 0)
            self.split(self.feed_forward, "w1", 0)
            self.split(self.feed_forward, "w2", 1)

    def split(self, module, name, dim):
        whole = getattr(module, name).detach()
        setattr(module, name, nn.Parameter(distribute_tensor(whole, self.mesh, [Shard(dim)])))

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, COPY).redistribute(placements=SEQUENCE).to_local()
        x = self.norm(x)
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, SEQUENCE).redistribute(placements=COPY).to_local()
        return self.head(x + self.feed_forward(x))


def main():
    mesh = None
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Model(mesh)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, foreach=False)
    with harness.training(model, optimizer):
        for step in range(2):
            tokens = torch.randint(15, (6, 9), generator=torch.Generator().manual_seed(step))
            logits = model(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
