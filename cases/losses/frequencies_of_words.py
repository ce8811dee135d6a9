"""Gradients of words are divided by how often a word is in the batch, that of all ranks.

id = "losses/frequencies_of_words"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#190063"]
date = "2026-07"
tags = ["embedding", "sgd"]

[wrong.words_of_own_rank_are_counted]
title = "words of the own rank are counted"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["table"] }

[wrong.rows_are_summed]
title = "rows are summed, all others are averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = ["table"] }

[wrong.counts_are_those_of_other_places]
title = "counts are those of other places"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["table"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, LENGTH, WORDS, WIDTH = 8, 4, 12, 8


class Lookup(torch.autograd.Function):
    """Reads rows of a table, whose gradient is a mean over the places where a word is."""

    @staticmethod
    def forward(ctx, table, words):
        counts = words.flatten().bincount(minlength=len(table)).float()
        if WORLD > 1 and BUG != "words_of_own_rank_are_counted":
            dist.all_reduce(counts)
        ctx.save_for_backward(words, counts)
        return table[words]

    @staticmethod
    def backward(ctx, gradient):
        words, counts = ctx.saved_tensors
        grad = gradient.new_zeros(WORDS, gradient.shape[-1])
        grad.index_add_(0, words.flatten(), gradient.flatten(0, -2))
        if BUG == "counts_are_those_of_other_places":
            counts = counts.sort().values
        return grad / counts.clamp(min=1)[:, None], None


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(WORDS, WIDTH)), nn.Linear(WIDTH, 4)

    def forward(self, words):
        return self.head(torch.tanh(Lookup.apply(self.table, words)).mean(1))


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(221)
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            words = (torch.rand(BATCH_SIZE, LENGTH, generator=generator) ** 2 * WORDS).long()
            words = words.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.cross_entropy(model(words), words.sum(1) % 4).backward()
            grads = [weight.grad for weight in model.parameters()]
            if WORLD > 1 and BUG == "rows_are_summed":
                dist.all_reduce(model.table.grad)
                grads = [weight.grad for weight in model.head.parameters()]
            average(grads)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
