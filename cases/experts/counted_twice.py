"""The load of experts is counted in the forward pass, which checkpointing computes twice.

id = "experts/counted_twice"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["pytorch/torchtitan#1593"]
date = "2025-08"
tags = ["ddp", "experts", "recomputation", "sgd"]

[wrong.recomputation_counts_tokens_again]
title = "recomputation counts the tokens again"
place = { node = "update", step = 0, ranks = "all", tensors = ["1.load", "1.bias"] }

[wrong.counts_of_earlier_steps_stay]
title = "counts of earlier steps stay"
place = { node = "update", step = 0, ranks = "all", tensors = ["1.load"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXPERTS, WIDTH, TOKENS, RATE = 4, 10, 24, 0.02


class Experts(nn.Module):
    """The bias changes which expert a token goes to, and has no gradient."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS))

    def route(self, x):
        scores = self.gate(x).sigmoid()
        chosen = F.one_hot((scores + self.bias).argmax(-1), EXPERTS).float()
        return scores * chosen, chosen.detach().sum(0)

    def compute(self, x, scores):
        return torch.einsum("td,edh,te->th", x, self.weight, scores)

    def route_and_compute(self, x):
        scores, load = self.route(x)
        self.load += load
        return self.compute(x, scores)

    def forward(self, x):
        if BUG == "recomputation_counts_tokens_again":
            return x + checkpoint(self.route_and_compute, x, use_reentrant=False)
        scores, load = self.route(x)
        self.load += load
        return x + checkpoint(self.compute, x, scores, use_reentrant=False)

    @torch.no_grad()
    def balance(self):
        load = self.load.clone()
        if WORLD > 1:
            dist.all_reduce(load)
        self.bias += RATE * (TOKENS / EXPERTS - load)
        if BUG != "counts_of_earlier_steps_stay":
            self.load.zero_()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(9)
    experts = Experts()
    model = nn.Sequential(nn.Linear(6, WIDTH), experts, nn.Linear(WIDTH, 2))
    wrapped = DistributedDataParallel(model, broadcast_buffers=False) if WORLD > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with harness.training(wrapped, optimizer):
        for step in range(3):
            x = 1 + torch.randn(TOKENS, 6, generator=torch.Generator().manual_seed(step))
            x = x[RANK::WORLD]
            loss = F.mse_loss(wrapped(x), x[:, :2] * x[:, 2:4])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            experts.balance()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
