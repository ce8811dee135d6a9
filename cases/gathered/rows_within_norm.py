"""Rows of a table are brought within a norm before they are read, on every rank the same ones.

id = "gathered/rows_within_norm"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#943"]
date = "2017-03"
tags = ["embedding", "sgd"]

[right.ranks_with_word_are_counted]
title = "ranks that have a word are counted"
patch = [["dist.ReduceOp.MAX", "dist.ReduceOp.SUM"]]

[wrong.only_rows_of_own_words_are_shortened]
title = "only rows of the own words are shortened"
place = { node = "update", step = 0, ranks = "all", tensors = ["table"] }

[wrong.all_rows_are_shortened]
title = "all rows are shortened"
place = { node = "update", step = 0, ranks = "all", tensors = ["table"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, LENGTH, WORDS, WIDTH, LONGEST = 8, 3, 40, 8, 2.5


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(WORDS, WIDTH)), nn.Linear(WIDTH, 3)

    @torch.no_grad()
    def shorten(self, words):
        """Shortens rows of words that are about to be read; others stay as they are."""
        read = torch.zeros(WORDS)
        read[words.flatten()] = 1
        if WORLD > 1 and BUG != "only_rows_of_own_words_are_shortened":
            dist.all_reduce(read, dist.ReduceOp.MAX)
        if BUG == "all_rows_are_shortened":
            read[:] = 1
        factors = (LONGEST / self.table.norm(dim=1)).clamp(max=1)
        self.table.mul_(torch.where(read > 0, factors, 1)[:, None])

    def forward(self, words):
        self.shorten(words)
        return self.head(torch.relu(self.table[words]).mean(1))


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(205)
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            words = torch.randint(WORDS, (BATCH_SIZE, LENGTH), generator=generator)
            words = words.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.cross_entropy(model(words), words.sum(1) % 3).backward()
            average([weight.grad for weight in model.parameters()])
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
