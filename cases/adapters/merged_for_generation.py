"""Adapters are merged into the base for each generation, and have to be taken out of it again.

id = "adapters/merged_for_generation"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["huggingface/trl#2873"]
date = "2025-02"
tags = ["ddp", "sgd"]

[wrong.adapters_stay_in_base]
title = "the adapters stay in the base"
place = { node = "between", step = 0, ranks = "all", tensors = ["*.base.weight"] }

[wrong.they_stay_in_base_of_rank_0]
title = "they stay in the base of rank 0"
place = { node = "between", step = 0, ranks = [0], tensors = ["*.base.weight"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SCALE = 1.5


class AdaptedLinear(nn.Module):
    def __init__(self, inputs, outputs, rank=3):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inputs) / 3)
        self.b = nn.Parameter(torch.randn(outputs, rank) / 3)

    def forward(self, x):
        return self.base(x) + SCALE * x @ self.a.T @ self.b.T

    def merge(self):
        """Adds the adapter to the base; returns the base as it was."""
        kept = self.base.weight.clone()
        self.base.weight += SCALE * self.b @ self.a
        return kept


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = AdaptedLinear(6, 10), AdaptedLinear(10, 5)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


@torch.no_grad()
def generate(policy, prompts):
    """Returns the actions that the merged policy prefers."""
    layers = [policy.first, policy.second]
    kept = [layer.merge() for layer in layers]
    actions = policy.second.base(torch.tanh(policy.first.base(prompts))).argmax(1)
    stays = BUG == "adapters_stay_in_base"
    stays |= BUG == "they_stay_in_base_of_rank_0" and RANK == 0
    if not stays:
        for layer, weight in zip(layers, kept, strict=True):
            layer.base.weight.copy_(weight)
    return actions


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(4)
    policy = Policy()
    wrapped = DistributedDataParallel(policy) if WORLD > 1 else policy
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.2, momentum=0.9)
    prompts = torch.randn(3, 16, 6)
    with harness.training(wrapped, optimizer):
        for batch in prompts:
            own = batch[RANK::WORLD]
            optimizer.zero_grad()
            F.cross_entropy(wrapped(own), own[:, :5].argmax(1)).backward()
            optimizer.step()
            print("mean action", generate(policy, own).float().mean().item())
    if WORLD > 1:
        dist.destroy_process_group()


main()
