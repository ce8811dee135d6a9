"""Rows of fused projections lie in pairs and triples, so that each part of them is whole.

id = "parallel/interleaved_rows"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA-NeMo/Automodel#1324", "pytorch/torchtitan#4323"]
date = "2026-02"
tags = ["embedding", "adam"]

[wrong.gate_and_up_are_taken_as_halves_of_part]
title = "gate and up are taken as halves of a part"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["feed_forward"] }

[wrong.queries_keys_and_values_are_taken_as_thirds]
title = "queries, keys and values are taken as thirds"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["attention"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
WORLD = int(os.environ.get("WORLD_SIZE", 1))
WORDS, WIDTH, HEADS, HIDDEN = 15, 12, 4, 20


def split(weight, mesh, dim):
    return nn.Parameter(distribute_tensor(weight, mesh, [Shard(dim)]) if mesh else weight)


def local(weight):
    return weight.to_local() if isinstance(weight, DTensor) else weight


class Parallel(nn.Module):
    """Its first weight is split by rows, its second by columns."""

    def __init__(self, rows, columns, mesh):
        super().__init__()
        self.mesh = mesh
        self.fused = split(torch.randn(rows, WIDTH) / WIDTH**0.5, mesh, 0)
        self.out = split(torch.randn(WIDTH, columns) / columns**0.5, mesh, 1)

    def forward(self, x):
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, [Replicate()])
            x = x.to_local(grad_placements=[Partial()])
        y = self.mixed(x @ local(self.fused).T) @ local(self.out).T
        if self.mesh is None:
            return y
        y = DTensor.from_local(y, self.mesh, [Partial()])
        return y.redistribute(placements=[Replicate()]).to_local()


class FeedForward(Parallel):
    def mixed(self, y):
        if WORLD > 1 and BUG == "gate_and_up_are_taken_as_halves_of_part":
            gate, up = y.chunk(2, -1)
        else:
            gate, up = y.unflatten(-1, (-1, 2)).unbind(-1)
        return F.silu(gate) * up


class Attention(Parallel):
    def mixed(self, y):
        if WORLD > 1 and BUG == "queries_keys_and_values_are_taken_as_thirds":
            y = y.unflatten(-1, (3, HEADS // WORLD, -1)).permute(2, 0, 3, 1, 4)
        else:
            y = y.unflatten(-1, (HEADS // WORLD, 3, -1)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(*y, is_causal=True)
        return y.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.attention = Attention(3 * WIDTH, WIDTH, mesh)
        self.feed_forward = FeedForward(2 * HIDDEN, HIDDEN, mesh)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norms[0](x))
        return self.head(x + self.feed_forward(self.norms[1](x)))


def main():
    mesh = None
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    torch.manual_seed(19)
    model = Model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, foreach=False)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(WORDS, (6, 9), generator=generator)
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
