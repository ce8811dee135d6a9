"""FSDP2 reduces gradients in bfloat16 although float32 was meant.

id = "precision/fsdp_reduce_dtype"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#190626", "meta-pytorch/torchtune#2267"]
date = "2026-07"
tags = ["fsdp2", "low_precision", "sgd"]

[wrong.gradients_are_reduced_in_bfloat16]
title = "gradients are reduced in bfloat16"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.weights_are_gathered_in_bfloat16]
title = "weights are gathered in bfloat16"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.one_layer_has_policy_of_its_own]
title = "one layer has a policy of its own"
place = { node = "sum", step = 0, ranks = "all", tensors = ["blocks.1.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def shard(model):
    mesh = init_device_mesh("cpu", (WORLD,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    if BUG == "gradients_are_reduced_in_bfloat16":
        policy = MixedPrecisionPolicy(reduce_dtype=BF16)
    if BUG == "weights_are_gathered_in_bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for number, block in enumerate(model.blocks):
        own = BUG == "one_layer_has_policy_of_its_own" and number == 1
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(None, BF16) if own else policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
if WORLD > 1:
    dist.init_process_group("gloo")
model = Net()
if WORLD > 1:
    shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with harness.training(model, optimizer):
    for step in range(2):
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        y = x[:, :3].argmax(dim=1)
        output = model(x[RANK::WORLD])
        nn.functional.cross_entropy(output.float(), y[RANK::WORLD]).backward()
        optimizer.step()
        optimizer.zero_grad()
if WORLD > 1:
    dist.destroy_process_group()
