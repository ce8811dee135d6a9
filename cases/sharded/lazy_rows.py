"""The table of words is updated lazily, in the rows of which any rank has a word in this step.

id = "sharded/lazy_rows"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["NVIDIA-Merlin/models#602", "tensorflow/tensorflow#23668"]
date = "2018-11"
tags = ["embedding", "sparse", "adam"]

[right.ranks_with_word_are_counted]
title = "ranks that have a word are counted"
patch = [["dist.ReduceOp.MAX", "dist.ReduceOp.SUM"]]

[wrong.only_rows_of_own_words_are_updated]
title = "only rows of the own words are updated"
place = { node = "update", step = 0, ranks = "all", tensors = ["table.weight"] }

[wrong.rows_without_words_move_on]
title = "rows without words move on"
place = { node = "update", step = 1, ranks = "all", tensors = ["table.weight"] }

[wrong.rows_are_means_over_ranks_that_have_them]
title = "rows are means over the ranks that have them"
place = { node = "sum", step = 0, ranks = "all", tensors = ["table.weight"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, LENGTH, WORDS, WIDTH = 8, 3, 40, 10


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, words):
        return self.head(torch.tanh(self.table(words).mean(1)))


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


def make_sparse(table, words):
    """Keeps the rows of the gradient that count as touched in this step."""
    touched = torch.zeros(WORDS)
    touched[words.flatten()] = 1
    if WORLD > 1 and BUG != "only_rows_of_own_words_are_updated":
        dist.all_reduce(touched, dist.ReduceOp.MAX)
    if BUG == "rows_without_words_move_on":
        touched[:] = 1
    rows, grad = touched.nonzero()[:, 0], table.grad
    if WORLD > 1 and BUG == "rows_are_means_over_ranks_that_have_them":
        counts = torch.zeros(WORDS)
        counts[words.flatten()] = 1
        dist.all_reduce(counts)
        grad *= WORLD / counts.clamp(min=1)[:, None]
    table.grad = None
    table.grad = torch.sparse_coo_tensor(rows[None], grad[rows], grad.shape)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(204)
    model = Bag()
    dense = torch.optim.SGD(model.head.parameters(), lr=0.3)
    lazy = torch.optim.SparseAdam([model.table.weight], lr=0.05, eps=1e-3)
    with harness.training(model, [dense, lazy]):
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            words = torch.randint(WORDS, (BATCH_SIZE, LENGTH), generator=generator)
            words = words.chunk(WORLD)[RANK]
            dense.zero_grad()
            lazy.zero_grad()
            F.cross_entropy(model(words), words.sum(1) % 2).backward()
            average([weight.grad for weight in model.parameters()])
            make_sparse(model.table.weight, words)
            dense.step()
            lazy.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
