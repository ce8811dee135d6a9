"""A sampler groups examples by length after a shuffle whose seed differs between ranks.

id = "data/length_grouped_sampler"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#9574"]
date = "2021-01"
tags = ["ddp", "loader", "embedding", "sgd"]

[wrong.generator_is_not_synchronised]
title = "generator is not synchronised"
place = { node = "examples", step = 0, ranks = [1], tensors = "all" }

[wrong.each_rank_sorts_its_own_part]
title = "each rank sorts its own part"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXAMPLES, BATCH, LENGTH = 40, 8, 9


class Text(Dataset):
    """Bags of words of different lengths."""

    def __init__(self):
        generator = torch.Generator().manual_seed(15)
        self.lengths = torch.randint(2, LENGTH, (EXAMPLES,), generator=generator)
        self.words = torch.randint(1, 20, (EXAMPLES, LENGTH), generator=generator)
        self.words *= torch.arange(LENGTH) < self.lengths.unsqueeze(1)

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        return self.words[index], self.words[index].sum() / 40


class LengthGrouped(Sampler):
    """Shuffles, and sorts large groups of examples by length; ranks take turns."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __iter__(self):
        seed = 16 + (RANK if BUG == "generator_is_not_synchronised" else 0)
        order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(seed))
        if BUG == "each_rank_sorts_its_own_part":
            yield from self.grouped(order.chunk(WORLD)[RANK])
        else:
            yield from self.grouped(order)[RANK::WORLD]

    def grouped(self, order):
        groups = order.split(2 * BATCH)
        return [i for g in groups for i in sorted(g.tolist(), key=lambda i: -self.lengths[i])]


def main():
    torch.manual_seed(17)
    model = nn.Sequential(nn.EmbeddingBag(20, 12, padding_idx=0), nn.Linear(12, 1), nn.Flatten(0))
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    data = Text()
    loader = DataLoader(data, BATCH // WORLD, sampler=LengthGrouped(data.lengths))
    with harness.training(model, optimizer):
        for _, (words, y) in zip(range(2), loader, strict=False):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(words), y).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
