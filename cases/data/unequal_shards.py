"""Each rank streams a shard of its own, and the shards have unequal sizes.

id = "data/unequal_shards"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/datasets#6437"]
date = "2023-11"
tags = ["ddp", "recurrent", "sgd"]

[wrong.short_shard_starts_again]
title = "the short shard starts again"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }

[wrong.mean_of_unequal_parts]
title = "mean of unequal parts"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH, SHARDS = 8, {"a": range(6), "b": range(6, 16)}  # Numbers of examples.
PART = {"a": 3, "b": 5}  # Of a batch, so that all shards end together.


def get_example(number):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
    return x, x[-1].sum().sin() * (1 + number / 8)


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.RNN(4, 12, batch_first=True), nn.Linear(12, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1]).squeeze(1)


def own_batches():
    own = list(SHARDS) if WORLD == 1 else [list(SHARDS)[RANK]]
    streams = {name: itertools.cycle(SHARDS[name]) for name in own}
    while True:
        numbers = []
        for name, stream in streams.items():
            is_equal = BUG == "short_shard_starts_again"
            size = BATCH // WORLD if is_equal else PART[name]
            numbers += itertools.islice(stream, size)
        yield [torch.stack(values) for values in zip(*map(get_example, numbers), strict=True)]


def main():
    torch.manual_seed(18)
    model = Last()
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    with harness.training(model, optimizer):
        for _, (x, y) in zip(range(2), own_batches(), strict=False):
            loss = nn.functional.mse_loss(model(x), y, reduction="sum")
            loss = loss / len(x) if BUG == "mean_of_unequal_parts" else loss * WORLD / BATCH
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
