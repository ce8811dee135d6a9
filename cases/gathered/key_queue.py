"""A queue of keys must be the same on all ranks, and each rank fills its own.

id = "gathered/key_queue"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["vturrisi/solo-learn#229", "facebookresearch/moco: moco/builder.py"]
date = "2022-03"
tags = ["gathered", "sgd"]

[wrong.each_rank_enqueues_its_own_keys]
title = "each rank enqueues its own keys"
place = { node = "update", step = 0, ranks = "all", tensors = ["queue", "place"] }

[wrong.queue_starts_from_other_values_on_each_rank]
title = "the queue starts from other values on each rank"
place = { node = "start", step = 0, ranks = "all", tensors = ["queue"] }
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH, KEYS, BATCH_SIZE, MOMENTUM, TEMPERATURE = 8, 16, 8, 0.9, 0.2


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, WIDTH))
        self.keys = copy.deepcopy(self.queries).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(KEYS, WIDTH), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def follow(self):
        """Moves the encoder of keys towards that of queries."""
        for key, query in zip(self.keys.parameters(), self.queries.parameters(), strict=True):
            key.lerp_(query, 1 - MOMENTUM)

    @torch.no_grad()
    def enqueue(self, keys):
        if WORLD > 1 and BUG != "each_rank_enqueues_its_own_keys":
            parts = [torch.empty_like(keys) for _ in range(WORLD)]
            dist.all_gather(parts, keys)
            keys = torch.cat(parts)
        self.queue[self.place : self.place + len(keys)] = keys
        self.place.copy_((self.place + len(keys)) % KEYS)

    def forward(self, first, second):
        """Returns logits, of which the first is that of the own key."""
        query = F.normalize(self.queries(first), dim=1)
        with torch.no_grad():
            key = F.normalize(self.keys(second), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.T], 1)
        return logits / TEMPERATURE, key


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = MoCo()
    views = torch.randn(3, 2, BATCH_SIZE, 10)
    if BUG == "queue_starts_from_other_values_on_each_rank":
        torch.manual_seed(RANK)
        model.queue = F.normalize(torch.randn(KEYS, WIDTH), dim=1)
    # The ranks have consecutive parts, so that gathered keys have the order of one process.
    own = slice(RANK * BATCH_SIZE // WORLD, (RANK + 1) * BATCH_SIZE // WORLD)
    weights = list(model.queries.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    with harness.training(model, optimizer):
        for first, second in views[:, :, own]:
            logits, keys = model(first, second)
            loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            for weight in weights if WORLD > 1 else ():
                dist.all_reduce(weight.grad)
                weight.grad /= WORLD
            optimizer.step()
            model.follow()
            model.enqueue(keys)
    if WORLD > 1:
        dist.destroy_process_group()


main()
