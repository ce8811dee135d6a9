"""Tensor parallelism draws a mask from the wrong random state.

id = "random/tensor_parallel_masks"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "NVIDIA/Megatron-LM#26",
    "tenstorrent/tt-metal#55947",
    "NVIDIA/TransformerEngine#1272",
]
date = "2020-02"
tags = ["sgd"]
note = "The generator is the model's own, whose state no recorder sees: the outputs tell."

[wrong.ranks_drop_other_elements_of_their_output]
title = "ranks drop other elements of their output"
place = { node = "random", step = 0, ranks = "all", tensors = "all" }

[wrong.ranks_drop_equal_elements_of_their_parts]
title = "ranks drop equal elements of their parts"
place = { node = "random", step = 0, ranks = [1], tensors = ["mlp"] }

[wrong.mask_is_drawn_in_each_step_with_one_seed]
title = "the mask is drawn in each step with one seed"
place = { node = "random", step = 1, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

BATCH_SIZE, WIDTH, HIDDEN = 8, 8, 16


class Copied(torch.autograd.Function):
    """Every rank uses the input: its gradients are added."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if WORLD > 1:
            dist.all_reduce(gradient)
        return gradient


class Added(torch.autograd.Function):
    """Adds the parts of all ranks."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.up = nn.Parameter(up.weight.detach().chunk(WORLD, 0)[RANK].clone())
        self.down = nn.Parameter(down.weight.detach().chunk(WORLD, 1)[RANK].clone())
        self.bias = nn.Parameter(down.bias.detach())

    def forward(self, x, generator):
        hidden = torch.relu(Copied.apply(x) @ self.up.T)
        keep = torch.rand(BATCH_SIZE, HIDDEN, generator=generator) < 0.8
        own = 0 if BUG == "ranks_drop_equal_elements_of_their_parts" else RANK
        hidden = hidden * keep.chunk(WORLD, 1)[own] / 0.8
        out = Added.apply(hidden @ self.down.T) + self.bias
        return out, generator


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = MLP()
        self.head = nn.Linear(WIDTH, 3)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x):
        if BUG == "mask_is_drawn_in_each_step_with_one_seed":
            self.generator.manual_seed(5)
        out, generator = self.mlp(x, self.generator)
        shape = (BATCH_SIZE, WIDTH)
        keep = torch.rand(shape, generator=generator) < 0.8
        if BUG == "ranks_drop_other_elements_of_their_output":
            keep = torch.rand(shape, generator=torch.Generator().manual_seed(RANK)) < 0.8
        return self.head(x + out * keep / 0.8)


torch.manual_seed(0)
layout = {}
if WORLD > 1:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    layout = {"mesh": mesh, "dims": {"mlp.up": "h[tp] d", "mlp.down": "d h[tp]"}}
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with harness.training(model, optimizer, **layout):
    for step in range(2):
        x = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
