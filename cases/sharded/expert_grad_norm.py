"""Experts of all ranks but the first are missing in the norm of the gradients.

id = "sharded/expert_grad_norm"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#5916"]
date = "2026-07"
tags = ["experts", "sgd"]

[wrong.only_experts_of_rank_0_are_counted]
title = "only the experts of rank 0 are counted"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.dense_weights_are_counted_on_each_rank]
title = "dense weights are counted on each rank"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXPERTS, WIDTH, MAX_NORM = 4, 8, 0.05


class Experts(nn.Module):
    """All experts see all tokens, weighted by the router's gates."""

    def __init__(self, mesh=None):
        super().__init__()
        self.mesh = mesh
        self.w1 = nn.Parameter(self.share(torch.randn(EXPERTS, WIDTH, 12) * 0.3))
        self.w2 = nn.Parameter(self.share(torch.randn(EXPERTS, 12, WIDTH) * 0.3))

    def share(self, weight):
        return weight if self.mesh is None else distribute_tensor(weight, self.mesh, [Shard(0)])

    def copy_in(self, x):
        """The ranks use the same input; its gradient is their sum."""
        x = DTensor.from_local(x, self.mesh, [Replicate()])
        return x.to_local(grad_placements=[Partial()])

    def forward(self, x, gates):
        w1, w2 = self.w1, self.w2
        if self.mesh is not None:
            x, gates = self.copy_in(x), self.copy_in(gates).chunk(WORLD, -1)[RANK]
            w1, w2 = w1.to_local(), w2.to_local()
        hidden = torch.einsum("bi,eih->beh", x, w1).relu()
        y = torch.einsum("beh,eho,be->bo", hidden, w2, gates)
        if self.mesh is not None:
            y = DTensor.from_local(y, self.mesh, [Partial()]).redistribute(placements=[Replicate()])
            y = y.to_local()
        return y


class Model(nn.Module):
    def __init__(self, mesh=None):
        super().__init__()
        self.inputs = nn.Linear(6, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts(mesh)
        self.outputs = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = torch.tanh(self.inputs(x))
        return self.outputs(x + self.experts(x, self.router(x).softmax(-1)))


def total_norm(model):
    squares = {name: p.grad for name, p in model.named_parameters()}
    if WORLD > 1:
        squares = {n: getattr(g, "_local_tensor", g) for n, g in squares.items()}
    squares = {name: g.square().sum() for name, g in squares.items()}
    of_experts = sum(s for name, s in squares.items() if "experts" in name)
    of_others = sum(s for name, s in squares.items() if "experts" not in name)
    if WORLD > 1:
        if BUG == "only_experts_of_rank_0_are_counted" and RANK > 0:
            of_experts = torch.zeros_like(of_experts)
        if BUG == "dense_weights_are_counted_on_each_rank":
            dist.all_reduce(of_others)
        dist.all_reduce(of_experts)
    return (of_experts + of_others).sqrt()


def main():
    mesh = None
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Model(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(24, 6, generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
            loss.backward()
            factor = float((MAX_NORM / total_norm(model)).clamp(max=1.0))
            for p in model.parameters():
                p.grad.mul_(factor)
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
