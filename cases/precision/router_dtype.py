"""A router of experts computes its logits in bfloat16, and chooses other experts.

id = "precision/router_dtype"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["marin-community/marin#4234", "vllm-project/vllm#14027"]
date = "2026-03"
tags = ["ddp", "low_precision", "experts"]

[wrong.router_logits_are_rounded_to_bfloat16]
title = "router logits are rounded to bfloat16"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["router"] }

[wrong.router_multiplies_in_bfloat16]
title = "the router multiplies in bfloat16"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["router"] }

[wrong.chosen_probabilities_are_rounded]
title = "the chosen probabilities are rounded"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["router"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Router(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width) / width**0.5)

    def forward(self, x):
        if BUG == "router_multiplies_in_bfloat16":
            logits = (x.bfloat16() @ self.weight.bfloat16().T).float()
        else:
            logits = x @ self.weight.T
        if BUG == "router_logits_are_rounded_to_bfloat16":
            logits = logits.bfloat16().float()
        chosen, experts = logits.softmax(-1).topk(2)
        if BUG == "chosen_probabilities_are_rounded":
            chosen = chosen.bfloat16().float()
        return chosen / chosen.sum(-1, keepdim=True), experts


class MixtureOfExperts(nn.Module):
    def __init__(self, width=12, experts=4):
        super().__init__()
        self.router = Router(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        chosen, experts = self.router(x)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (chosen * (experts == number)).sum(-1, keepdim=True)
            mixed = mixed + share * torch.relu(expert(x))
        return self.head(x + mixed)


def main():
    torch.manual_seed(0)
    model = MixtureOfExperts()
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02, eps=1e-3)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(24, 12, generator=torch.Generator().manual_seed(step))
            y = x[:, :3].argmax(dim=1)
            loss = nn.functional.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
