"""A norm is shared by the heads of all ranks, and its gradient is not added over them.

id = "parallel/finding_11_output_norm"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#7452"]
date = "2026-09"
tags = ["sgd"]

[wrong.gradient_of_norm_is_not_added]
title = "gradient of the norm is not added"
place = { node = "sum", step = 0, ranks = "all", tensors = ["memory.norm.weight"] }

[wrong.gradient_of_norm_is_averaged]
title = "gradient of the norm is averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = ["memory.norm.weight"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH, HEAD, CLASSES = 16, 4, 5


def add(x):
    x = x.clone(memory_format=torch.contiguous_format)
    if WORLD > 1:
        dist.all_reduce(x)
    return x


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return add(gradient)


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return add(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def part(dim):
    return nn.Parameter((torch.randn(WIDTH, WIDTH) / 3).chunk(WORLD, dim)[RANK].clone())


class GatedMemory(nn.Module):
    """A recurrent layer: each head forgets and adds, is normalised and multiplied by a gate."""

    def __init__(self):
        super().__init__()
        self.value, self.forget, self.gate, self.project = part(0), part(0), part(0), part(1)
        self.norm = nn.RMSNorm(HEAD)

    def forward(self, x):
        x = Enter.apply(x)
        value, forget = F.linear(x, self.value), torch.sigmoid(F.linear(x, self.forget))
        state, states = torch.zeros_like(value[:, 0]), []
        for time in range(x.shape[1]):
            state = forget[:, time] * state + value[:, time]
            states.append(state)
        y = self.norm(torch.stack(states, 1).unflatten(2, (-1, HEAD))).flatten(2)
        y = y * F.silu(F.linear(x, self.gate))
        return Leave.apply(F.linear(y, self.project))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.memory = nn.Linear(3, WIDTH), GatedMemory()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.inputs(x)
        return self.head((x + self.memory(x))[:, -1])


def finalise_gradients(model):
    if BUG == "gradient_of_norm_is_not_added":
        return
    norm = model.memory.norm.weight
    norm.grad = add(norm.grad)
    if BUG == "gradient_of_norm_is_averaged":
        norm.grad /= WORLD


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        dims = {f"memory.{name}": "o[tp] i" for name in ("value", "forget", "gate")}
        layout = {"mesh": mesh, "dims": {"inputs": "b s", "memory.project": "o i[tp]", **dims}}
    torch.manual_seed(13)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
    with harness.training(model, optimizer, **layout):
        for _ in range(2):
            x, y = torch.randn(8, 6, 3), torch.randint(CLASSES, (8,))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            finalise_gradients(model)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
