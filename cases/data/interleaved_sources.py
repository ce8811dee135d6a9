"""Two streams are mixed by chance, and split over the ranks before or after they are mixed.

id = "data/interleaved_sources"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/datasets#7868"]
date = "2025-11"
tags = ["ddp", "loader", "sgd"]

[wrong.mixture_forgets_split_of_its_sources]
title = "the mixture forgets the split of its sources"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }

[wrong.each_rank_mixes_its_parts_of_sources]
title = "each rank mixes its parts of the sources"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
"""

import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, BATCH_SIZE = 2, 12


def source(first):
    """Yields examples with their numbers as seeds."""
    for number in itertools.count(first):
        x = torch.randn(8, generator=torch.Generator().manual_seed(number))
        yield x * (1 + (first > 0)), (x[:3] + first).argmax()


def split(stream):
    return itertools.islice(stream, RANK, None, WORLD)


def mix(sources):
    generator = torch.Generator().manual_seed(17)
    while True:
        yield next(sources[int(torch.rand(1, generator=generator) > 0.6)])


class Mixture(IterableDataset):
    def __iter__(self):
        sources = [source(0), source(1000)]
        if BUG == "mixture_forgets_split_of_its_sources":
            return mix(sources)
        if BUG == "each_rank_mixes_its_parts_of_sources":
            return mix([split(stream) for stream in sources])
        return split(mix(sources))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Sigmoid(), nn.Linear(12, 3))
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches = itertools.islice(DataLoader(Mixture(), BATCH_SIZE // WORLD), STEPS)
    with harness.training(wrapped, optimizer):
        for x, y in batches:
            loss = nn.functional.cross_entropy(wrapped(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
