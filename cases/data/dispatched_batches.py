"""Rank 0 reads the batches and sends them to all ranks, which cut out the wrong slices.

id = "data/dispatched_batches"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/accelerate#961", "huggingface/accelerate#588"]
date = "2023-01"
tags = []

[wrong.remainder_is_filled_up_from_first_batch]
title = "remainder is filled up from the first batch"
place = { node = "examples", step = 1, ranks = [1], tensors = "all" }

[wrong.all_ranks_take_first_slice]
title = "all ranks take the first slice"
place = { node = "examples", step = 0, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def read_batches():
    """Batches of 8 and of 5 examples, which only rank 0 has."""
    generator = torch.Generator().manual_seed(12)
    for size in (8, 5):
        x = torch.randn(size, 4, generator=generator)
        yield torch.cat([x, x.square().sum(1, keepdim=True)], 1)


class Dispatcher:
    def __iter__(self):
        first, batches = None, read_batches() if RANK == 0 else [None] * 2
        for batch in batches:
            sent = [batch]
            if WORLD > 1:
                dist.broadcast_object_list(sent, 0)
            batch = sent[0]
            first = batch if first is None else first
            if BUG == "remainder_is_filled_up_from_first_batch":
                batch = torch.cat([batch, first[: -len(batch) % WORLD]])
            if BUG == "all_ranks_take_first_slice":
                yield batch.tensor_split(WORLD)[0], len(batch)
            else:
                yield batch.tensor_split(WORLD)[RANK], len(batch)


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(13)
model = nn.Sequential(nn.Linear(4, 16), nn.Softplus(), nn.Linear(16, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, eps=1e-2)
with harness.training(model, optimizer):
    for part, size in Dispatcher():
        x, y = part[:, :4], part[:, 4:]
        optimizer.zero_grad()
        (nn.functional.mse_loss(model(x), y, reduction="sum") / size).backward()
        if WORLD > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
