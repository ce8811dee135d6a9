"""With a memory budget, torch.compile draws a dropout mask again in the backward pass.

id = "random/memory_budget"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#190758", "pytorch/pytorch#190717"]
date = "2026-07"
tags = ["adam"]
note = "Without a C++ compiler: the backend partitions the graph and runs it eagerly."

[wrong.budget_is_0]
title = "the budget is 0"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["first.*", "second.weight"] }
"""

import os

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

GLOBAL_BATCH_SIZE = 8
if BUG == "budget_is_0":
    torch._functorch.config.activation_memory_budget = 0.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        mask = torch.rand(GLOBAL_BATCH_SIZE, 16) < 0.6
        return self.second(x * mask[RANK::WORLD] / 0.6)


def main():
    torch.manual_seed(0)
    if WORLD > 1:
        dist.init_process_group("gloo")
    model = Net()
    model.compile(backend="aot_eager_decomp_partition")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    with harness.training(model, optimizer):
        for step in range(2):
            torch.manual_seed(10 + step)
            x = torch.randn(GLOBAL_BATCH_SIZE, 6)
            y = x[:, :3].argmax(dim=1)
            loss = nn.functional.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD])
            (loss / WORLD).backward()
            for weight in model.parameters() if WORLD > 1 else ():
                dist.all_reduce(weight.grad)
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


main()
