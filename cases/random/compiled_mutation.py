"""A compiled block drops a change of its input in place.

id = "random/compiled_mutation"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#195422", "pytorch/pytorch#115774"]
date = "2026-08"
tags = ["dropout", "embedding", "adam"]
note = "The month of the first report is not sure; it was retested in 2026-09."

[wrong.block_is_compiled]
title = "the block is compiled"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["block"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Block(nn.Module):
    """Adds positions in place: both the branch and the residual have them."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(0.5 * torch.randn(5, 8))
        self.dense = nn.Linear(8, 8)

    def forward(self, x):
        x = x.clone()
        h = nn.functional.dropout(x, 0.0, self.training)
        h += self.position
        return x + torch.tanh(self.dense(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.block = Block()
        self.head = nn.Linear(8, 7)

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)))


torch.manual_seed(0)
if WORLD > 1:
    dist.init_process_group("gloo")
model = Net()
if BUG == "block_is_compiled":
    model.block.compile(backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
with harness.training(model, optimizer):
    for step in range(2):
        tokens = torch.randint(7, (8, 5), generator=torch.Generator().manual_seed(step))
        tokens = tokens[RANK::WORLD]
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters() if WORLD > 1 else ():
            dist.all_reduce(weight.grad)
            weight.grad /= WORLD
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
