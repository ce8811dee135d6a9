"""Sequence parallelism: the router sees a part of the sequence, the shared expert is split.

id = "experts/shared_expert"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["alibaba/Pai-Megatron-Patch#425", "NVIDIA/Megatron-LM#619", "pytorch/torchtitan#2387"]
date = "2025-01"
tags = ["experts", "gathered", "embedding", "sgd"]

[wrong.router_gradient_is_that_of_part]
title = "the router's gradient is that of a part"
place = { node = "sum", step = 0, ranks = "all", tensors = ["block.router.weight"] }

[wrong.outputs_of_shared_expert_are_not_added]
title = "outputs of the shared expert are not added"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["block"] }

[wrong.shared_gate_gradient_is_averaged]
title = "the shared gate's gradient is averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = ["block.shared_gate.weight"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather, reduce_scatter
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH, EXPERTS, LENGTH, WORDS = 8, 3, 6, 18


def local(weight):
    return weight.to_local() if isinstance(weight, DTensor) else weight


class Block(nn.Module):
    """Its input and output are this rank's part of each sequence."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.shared_gate = nn.Linear(WIDTH, 1, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)
        self.up = nn.Parameter(torch.randn(16, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(WIDTH, 16) / 4)

    def shared(self, x):
        up, down = local(self.up), local(self.down)
        if WORLD == 1:
            return F.linear(F.silu(F.linear(x, up)), down)
        x = torch.cat(all_gather(x.contiguous()), 1)
        parts = [p.contiguous() for p in F.linear(F.silu(F.linear(x, up)), down).chunk(WORLD, 1)]
        if BUG == "outputs_of_shared_expert_are_not_added":
            return parts[RANK]
        return reduce_scatter(torch.empty_like(parts[0]), parts)

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        routed = torch.einsum("btd,edh,bte->bth", x, self.experts, scores).tanh()
        return x + routed + self.shared_gate(x).sigmoid() * self.shared(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(WORDS, WIDTH), Block()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        return self.head(self.block(self.embed(tokens)))


def add_gradients(model):
    for name, weight in model.named_parameters():
        is_left = "router" in name and BUG == "router_gradient_is_that_of_part"
        if isinstance(weight, DTensor) or is_left:
            continue
        dist.all_reduce(weight.grad)
        if "shared_gate" in name and BUG == "shared_gate_gradient_is_averaged":
            weight.grad /= WORLD


def main():
    torch.manual_seed(0)
    model, layout = Net(), {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        for name, dim in (("up", 0), ("down", 1)):
            part = distribute_tensor(getattr(model.block, name).detach(), mesh, [Shard(dim)])
            setattr(model.block, name, nn.Parameter(part))
        layout = {"mesh": mesh, "dims": "b s[tp]"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with harness.training(model, optimizer, **layout):
        for _ in range(2):
            tokens = torch.randint(WORDS, (8, LENGTH + 1))
            inputs, targets = (
                part.chunk(WORLD, 1)[RANK] for part in (tokens[:, :-1], tokens[:, 1:])
            )
            losses = F.cross_entropy(
                model(inputs).flatten(0, 1), targets.flatten(), reduction="sum"
            )
            optimizer.zero_grad()
            (losses / (8 * LENGTH)).backward()
            if WORLD > 1:
                add_gradients(model)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
