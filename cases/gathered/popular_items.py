"""Items of a batch serve as negatives; scores lose the logarithm of how popular each one is.

id = "gathered/popular_items"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "tensorflow/recommenders#219",
    "tensorflow/recommenders#278",
    "NVIDIA-Merlin/models#1051",
]
date = "2021-01"
tags = ["embedding", "gathered", "sgd"]

[right.popularity_is_a_count]
title = "the popularity is a count"
patch = [[".float() / len(counted)", ".float()"]]

[wrong.popularity_is_counted_on_own_rank]
title = "popularity is counted on the own rank"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.logarithm_is_added]
title = "the logarithm is added"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.same_items_count_as_negatives]
title = "the same items count as negatives"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, USERS, ITEMS, WIDTH = 12, 20, 8, 10


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, users, items):
        return torch.tanh(self.mix(self.users(users))), self.items(items)


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


def gathered(values):
    return torch.cat(all_gather(values)) if WORLD > 1 else values


def loss_of(users, vectors, items):
    """Each user is to find the item of the same place among those of all ranks."""
    all_items = gathered(items)
    counted = items if BUG == "popularity_is_counted_on_own_rank" else all_items
    counts = counted.bincount(minlength=ITEMS).float() / len(counted)
    popularity = gathered(counts[items])
    scores = users @ gathered(vectors).T
    if BUG == "logarithm_is_added":
        scores = scores + popularity.log()
    else:
        scores = scores - popularity.log()
    places = torch.arange(len(items)) + RANK * len(items)
    if BUG != "same_items_count_as_negatives":
        is_same = items[:, None] == all_items
        is_same[torch.arange(len(items)), places] = False
        scores = scores.masked_fill(is_same, -1e9)
    return F.cross_entropy(scores, places)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(217)
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            users = torch.randint(USERS, (BATCH_SIZE,), generator=generator)
            items = (torch.rand(BATCH_SIZE, generator=generator) ** 2 * ITEMS).long()
            users, items = users.chunk(WORLD)[RANK], items.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            loss_of(*model(users, items), items).backward()
            average([weight.grad for weight in model.parameters()])
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
