"""Ranks read their parts of a file of tokens one after another, and all of them turn to the next.

id = "data/next_shard_of_tokens"
framework = "torch"
processes = 2
steps = 4
mode = "pair"
references = [
    "karpathy/build-nanogpt#26",
    "karpathy/build-nanogpt#100",
    "karpathy/build-nanogpt#109",
]
date = "2024-06"
tags = ["ddp", "recurrent", "embedding", "adam"]

[wrong.all_ranks_begin_file_at_its_start]
title = "all ranks begin a file at its start"
place = { node = "examples", step = 2, ranks = [1], tensors = "all" }

[wrong.rank_asks_for_its_own_tokens_only]
title = "a rank asks for its own tokens only"
place = { node = "examples", step = 2, ranks = [0], tensors = "all" }

[wrong.each_rank_skips_as_many_files_as_there]
title = "each rank skips as many files as there are ranks"
place = { node = "examples", step = 2, ranks = "all", tensors = "all" }
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
WORDS, WIDTH, LENGTH, ROWS = 13, 10, 5, 8 // WORLD
FILES = torch.randint(WORDS, (4, 105), generator=torch.Generator().manual_seed(0))


class Loader:
    def __init__(self):
        self.file, self.place = 0, RANK * ROWS * LENGTH

    def next(self):
        """Returns inputs and targets, and moves on, to the next file if this one is too short."""
        own = ROWS * LENGTH
        text = FILES[self.file][self.place : self.place + own + 1]
        self.place += own * WORLD
        needed = own * WORLD
        if BUG == "rank_asks_for_its_own_tokens_only":
            needed = own
        last = self.place + needed + 1
        if BUG != "rank_asks_for_its_own_tokens_only":
            last -= RANK * own  # All ranks turn to the next file in the same step.
        if last > FILES.shape[1]:
            skipped = WORLD if BUG == "each_rank_skips_as_many_files_as_there" else 1
            self.file = (self.file + skipped) % len(FILES)
            self.place = 0 if BUG == "all_ranks_begin_file_at_its_start" else RANK * own
        return text[:-1].view(ROWS, LENGTH), text[1:].view(ROWS, LENGTH)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.cell = nn.RNN(WIDTH, 14, batch_first=True)
        self.head = nn.Linear(14, WORDS)

    def forward(self, tokens):
        return self.head(self.cell(self.embed(tokens))[0])


def main():
    torch.manual_seed(45)
    model = Reader()
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4, weight_decay=0.1)
    loader = Loader()
    with harness.training(model, optimizer):
        for _ in range(4):
            tokens, targets = loader.next()
            optimizer.zero_grad()
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
