"""A memory has the embeddings of the last batches, in one order on all ranks.

id = "gathered/memory_of_batches"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = [
    "KevinMusgrave/pytorch-metric-learning#639",
    "KevinMusgrave/pytorch-metric-learning#24",
]
date = "2020-03"
tags = ["ddp", "gathered", "sgd"]

[wrong.own_embeddings_come_first]
title = "own embeddings come first"
place = { node = "update", step = 0, ranks = [1], tensors = ["memory.embeddings", "memory.labels"] }

[wrong.batch_joins_memory_after_its_loss]
title = "the batch joins the memory after its loss"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, CLASSES, WIDTH, PLACES, MARGIN = 12, 4, 6, 20, 0.4


class Memory(nn.Module):
    """The oldest embeddings are replaced, from a place that moves around."""

    def __init__(self):
        super().__init__()
        self.register_buffer("embeddings", F.normalize(torch.randn(PLACES, WIDTH), dim=1))
        self.register_buffer("labels", torch.randint(CLASSES, (PLACES,)).float())
        self.place = 0

    @torch.no_grad()
    def add(self, embeddings, labels):
        places = (self.place + torch.arange(len(labels))) % PLACES
        self.embeddings[places], self.labels[places] = embeddings, labels.float()
        self.place = (self.place + len(labels)) % PLACES


def gather(x):
    if WORLD == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(parts, x.contiguous())
    if BUG == "own_embeddings_come_first":
        parts.insert(0, parts.pop(RANK))
    return torch.cat(parts)


def contrast(embeddings, labels, memory):
    """Draws equal labels together, and others apart up to a margin."""
    distances = (1 - embeddings @ memory.embeddings.T).clamp(min=0)
    is_equal = labels[:, None] == memory.labels
    return torch.where(is_equal, distances, F.relu(MARGIN - distances)).mean()


def main():
    torch.manual_seed(32)
    encoder, memory = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, WIDTH)), Memory()
    model = encoder
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(encoder)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.5, momentum=0.9)
    with harness.training(model, optimizer, others={"memory": memory}):
        for step in range(3):
            x = torch.randn(BATCH_SIZE, 8, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            labels = x[:, :CLASSES].argmax(1)
            embeddings = F.normalize(model(x), dim=1)
            everything = gather(embeddings.detach()), gather(labels)
            if BUG != "batch_joins_memory_after_its_loss":
                memory.add(*everything)
            optimizer.zero_grad()
            contrast(embeddings, labels, memory).backward()
            optimizer.step()
            if BUG == "batch_joins_memory_after_its_loss":
                memory.add(*everything)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
