"""A loader of a subset gives positions within the subset, as if they were numbers of examples.

id = "data/indices_of_subset"
framework = "torch"
processes = 2
steps = 4
mode = "pair"
references = ["libffcv/ffcv#90", "libffcv/ffcv#92"]
date = "2022-01"
tags = ["ddp", "loader", "sgd"]

[wrong.positions_are_taken_for_numbers_of_examples]
title = "positions are taken for numbers of examples"
place = { node = "examples", step = 2, ranks = "all", tensors = "all" }

[wrong.order_by_pages_is_not_split]
title = "the order by pages is not split"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
"""

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, PAGE = 12, 4


class Loader:
    """Reads batches of the examples whose numbers are in a list."""

    def __init__(self, x, y, numbers, by_pages):
        self.x, self.y, self.numbers, self.by_pages = x, y, np.array(numbers), by_pages

    def order(self, epoch):
        if self.by_pages:  # Pages in random order, and the examples of each page together.
            pages = np.random.default_rng(epoch).permutation(len(self.numbers) // PAGE)
            places = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()
            if BUG == "order_by_pages_is_not_split":
                return self.numbers[places]
            return self.numbers[places[RANK::WORLD]]
        sampler = DistributedSampler(self.numbers, WORLD, RANK, seed=2)
        sampler.set_epoch(epoch)
        places = np.array(list(sampler))
        if BUG == "positions_are_taken_for_numbers_of_examples" and WORLD > 1:
            return places
        return self.numbers[places]

    def batches(self, epoch):
        order, size = self.order(epoch), BATCH_SIZE // WORLD
        for start in range(0, len(self.numbers) // WORLD, size):
            numbers = order[start : start + size]
            yield self.x[numbers], self.y[numbers]


def main():
    torch.manual_seed(3)
    x, y = torch.randn(90, 3, 6, 6), torch.randint(4, (90,))
    numbers = np.random.default_rng(1).permutation(90)[:24]  # Examples for the training.
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.LeakyReLU(), nn.Flatten())
    model.append(nn.Linear(32, 4))
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    with harness.training(model, optimizer):
        for by_pages in (True, False):
            for images, labels in Loader(x, y, numbers, by_pages).batches(epoch=0):
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
