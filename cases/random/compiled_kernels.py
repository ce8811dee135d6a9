"""A transformer block compiled by inductor rounds otherwise, and draws its own dropout masks.

id = "random/compiled_kernels"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#179575"]
date = "2026-04"
tags = ["embedding", "adam"]
note = "Needs a C++ compiler; the report is of rounding alone, its month not sure."

[wrong.inductor_draws_masks]
title = "inductor draws the masks"
place = { node = "random", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

GLOBAL_BATCH_SIZE = 8
# With this option, compiled programs draw the numbers that eager ones draw.
torch._inductor.config.fallback_random = BUG != "inductor_draws_masks"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.project = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        query, key, value = self.project(self.norm(x)).chunk(3, dim=-1)
        h = self.out(nn.functional.scaled_dot_product_attention(query, key, value))
        mask = torch.rand(GLOBAL_BATCH_SIZE, 5, 8) < 0.8
        return x + h * mask[RANK::WORLD] / 0.8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.block = Block()
        self.head = nn.Linear(8, 7)

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)))


def main():
    torch.manual_seed(0)
    if WORLD > 1:
        dist.init_process_group("gloo")
    model = Net()
    if WORLD > 1:
        model.block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(7, (GLOBAL_BATCH_SIZE, 5), generator=generator)[RANK::WORLD]
            torch.manual_seed(10 + step)
            outputs = model(tokens).flatten(0, 1)
            loss = nn.functional.cross_entropy(outputs, tokens.flip(1).flatten())
            optimizer.zero_grad()
            (loss / WORLD).backward()
            for weight in model.parameters() if WORLD > 1 else ():
                dist.all_reduce(weight.grad)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
