"""A load-balancing loss of the whole batch is divided by all tokens, and then by the ranks.

id = "experts/global_balance_loss"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#3672", "NVIDIA/Megatron-LM#3769"]
date = "2026-03"
tags = ["ddp", "experts", "sgd"]

[wrong.loss_is_divided_by_all_tokens]
title = "the loss is divided by all tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.fractions_of_own_tokens]
title = "fractions of the own tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


@dataclass
class Config:
    width: int = 16
    experts: int = 4
    batch: int = 24
    coefficient: float = 0.5
    steps: int = 2


class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router = nn.Linear(config.width, config.experts)
        sizes = [config.width] * config.experts
        self.experts = nn.ModuleList(nn.Linear(size, config.width) for size in sizes)
        self.head = nn.Linear(config.width, 1)

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        y = torch.stack([expert(x).relu() for expert in self.experts], 1)
        chosen = F.one_hot(probs.argmax(-1), probs.shape[-1])
        return self.head((y * (chosen * probs)[..., None]).sum(1)), probs


def balance_loss(probs):
    """Returns E · Σ f P, with the fractions f of all tokens; the ranks average it."""
    tokens, experts = probs.shape
    counts = F.one_hot(probs.argmax(-1), experts).sum(0).float()
    total = tokens * WORLD
    if BUG == "fractions_of_own_tokens":
        total = tokens
    elif WORLD > 1:
        dist.all_reduce(counts)
    divisor = total if BUG == "loss_is_divided_by_all_tokens" else tokens
    return experts * (counts / total * probs.sum(0) / divisor).sum()


def main(config):
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = Net(config)
    if WORLD > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with harness.training(model, optimizer):
        for _ in range(config.steps):
            x = torch.randn(config.batch, config.width)
            x, y = x[RANK::WORLD], x[RANK::WORLD, :1].abs()
            output, probs = model(x)
            loss = F.mse_loss(output, y) + config.coefficient * balance_loss(probs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main(Config())
