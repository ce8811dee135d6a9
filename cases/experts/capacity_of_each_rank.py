"""Experts drop tokens beyond their capacity for each rank, not for the whole batch.

id = "experts/capacity_of_each_rank"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["deepseek-ai/DeepSeek-V2#48", "deepspeedai/DeepSpeed: deepspeed/moe/sharded_moe.py"]
date = "2024-05"
tags = ["ddp", "experts", "gathered", "sgd"]

[wrong.each_rank_keeps_its_own_best_tokens]
title = "each rank keeps its own best tokens"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["layers.0", "layers.2"] }

[wrong.capacity_is_that_of_rank_tokens]
title = "the capacity is that of a rank's tokens"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["layers.0", "layers.2"] }
"""

import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXPERTS, WIDTH, BATCH, FACTOR = 3, 8, 36, 0.6


def kept(probs, chosen):
    """Returns which tokens are among the best of their expert, as many as its capacity."""
    tokens, every = len(probs), F.one_hot(chosen, EXPERTS) * probs
    if WORLD > 1 and BUG != "each_rank_keeps_its_own_best_tokens":
        parts = [torch.empty_like(every) for _ in range(WORLD)]
        dist.all_gather(parts, every.detach().contiguous())
        parts[RANK] = every
        every = torch.cat(parts)
        if BUG != "capacity_is_that_of_rank_tokens":
            tokens *= WORLD
    capacity = math.ceil(FACTOR * tokens / EXPERTS)
    least = every.topk(capacity, 0).values[-1]
    return (F.one_hot(chosen, EXPERTS) * (probs >= least)).any(-1)


class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        score, chosen = probs.max(-1)
        every = torch.stack([expert(x) for expert in self.experts], 1)
        y = every[torch.arange(len(x)), chosen] * score[:, None]
        return x + y * kept(probs, chosen)[:, None]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Switch(), nn.Tanh(), Switch())
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.layers(x))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(11)
    model = Net()
    if WORLD > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    size = BATCH // WORLD
    with harness.training(model, optimizer):
        for _ in range(2):
            x = torch.randn(BATCH, WIDTH)
            y = x[:, :4].argmax(-1)
            own = slice(RANK * size, (RANK + 1) * size)
            loss = F.cross_entropy(model(x[own]), y[own])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
