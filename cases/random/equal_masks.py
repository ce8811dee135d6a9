"""All ranks have one seed, and so their dropout masks are equal.

id = "random/equal_masks"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#31412", "tenstorrent/tt-metal#16823"]
date = "2024-06"
tags = ["ddp", "dropout", "sgd"]

[wrong.each_rank_draws_mask_with_same_seed]
title = "each rank draws a mask with the same seed"
place = { node = "random", step = 0, ranks = "all", tensors = "all" }

[wrong.seed_is_set_again_in_each_step]
title = "the seed is set again in each step"
place = { node = "random", step = 1, ranks = "all", tensors = "all" }

[wrong.masks_are_drawn_for_first_rank_rows]
title = "masks are drawn for the first rank's rows"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

GLOBAL_BATCH_SIZE = 12


class Dropout(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training:
            return x
        if BUG == "each_rank_draws_mask_with_same_seed":
            return nn.functional.dropout(x, self.rate)
        keep = torch.rand(GLOBAL_BATCH_SIZE, x.shape[1]) >= self.rate
        own = 0 if BUG == "masks_are_drawn_for_first_rank_rows" else RANK
        return x * keep[own::WORLD] / (1 - self.rate)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 6, 3)
        self.dropout = Dropout(0.4)
        self.head = nn.Linear(36, 3)

    def forward(self, x):
        return self.head(self.dropout(torch.relu(self.conv(x)).flatten(1)))


torch.manual_seed(0)
model = Classifier()
if WORLD > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
torch.manual_seed(1234)
with harness.training(model, optimizer):
    for step in range(2):
        if BUG == "seed_is_set_again_in_each_step":
            torch.manual_seed(1234)
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(GLOBAL_BATCH_SIZE, 2, 8, generator=generator)
        y = torch.randint(3, (GLOBAL_BATCH_SIZE,), generator=generator)
        loss = nn.functional.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
