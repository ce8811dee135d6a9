"""Each rank shuffles a stream with a seed of its own, and then takes its part of it.

id = "data/shuffle_buffer"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/datasets#5696", "webdataset/webdataset#225"]
date = "2023-04"
tags = ["ddp", "sgd"]

[wrong.seed_of_rank]
title = "seed of the rank"
place = { node = "examples", step = 0, ranks = [1], tensors = "all" }

[wrong.buffer_after_split]
title = "buffer after the split"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
"""

import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH, SEED = 6, 10


def shuffle(stream, seed, size=8):
    """Yields a random element of a buffer, and puts the next one of the stream in its place."""
    choose, buffer = random.Random(seed), []
    for element in stream:
        if len(buffer) < size:
            buffer.append(element)
        else:
            place = choose.randrange(size)
            yield buffer[place]
            buffer[place] = element


def own_examples():
    numbers = range(60)
    if BUG == "buffer_after_split":
        yield from shuffle(numbers[RANK::WORLD], SEED)
        return
    seed = SEED + RANK if BUG == "seed_of_rank" else SEED
    for place, number in enumerate(shuffle(numbers, seed)):
        if place % WORLD == RANK:
            yield number


def get_example(number):
    x = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(number))
    return x, x.mean() * 6


torch.manual_seed(SEED)
model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(96, 1))
if WORLD > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
stream = own_examples()
with harness.training(model, optimizer):
    for _ in range(2):
        batch = [get_example(next(stream)) for _ in range(BATCH // WORLD)]
        x, y = (torch.stack(values) for values in zip(*batch, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x).squeeze(1), y).backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
