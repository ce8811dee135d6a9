"""Activation checkpointing computes a block again with another dropout mask.

id = "random/recomputed_mask"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["allenai/OLMo-core#828", "pytorch/torchtitan#1323", "ankanbhunia/PIDM#66"]
date = "2026-08"
tags = ["ddp", "dropout", "recomputation", "sgd"]
note = "Masks are drawn for the global batch, so that each rank has its rows of one mask."

[wrong.random_state_is_not_preserved]
title = "the random state is not preserved"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["embed.*", "blocks.*"] }

[wrong.second_block_is_recomputed_without_its_state]
title = "the second block is recomputed without its state"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["embed.*", "blocks.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

GLOBAL_BATCH_SIZE, WIDTH = 8, 16


class GlobalDropout(nn.Module):
    """Drops with the rows of a mask that belong to the rank."""

    def forward(self, x):
        mask = torch.rand(GLOBAL_BATCH_SIZE, x.shape[1]) < 0.7
        return x * mask[RANK::WORLD] / 0.7


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.dropout = GlobalDropout()

    def forward(self, x):
        return x + self.dropout(torch.relu(self.dense(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            lost = BUG == "random_state_is_not_preserved" or (
                BUG == "second_block_is_recomputed_without_its_state" and number == 1
            )
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=not lost)
        return self.head(x)


torch.manual_seed(0)
model = Model()
if WORLD > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with harness.training(model, optimizer):
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(GLOBAL_BATCH_SIZE, 6, generator=generator)
        y = torch.randint(4, (GLOBAL_BATCH_SIZE,), generator=generator)
        torch.manual_seed(100 + step)  # The state before a step does not depend on the past.
        loss = nn.functional.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
