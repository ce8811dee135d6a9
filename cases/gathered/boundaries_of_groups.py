"""Embeddings of all ranks are cut into groups of a question, its answer and its negatives.

id = "gathered/boundaries_of_groups"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["modelscope/ms-swift#10069", "modelscope/ms-swift#9179"]
date = "2026-04"
tags = ["ddp", "gathered", "embedding", "adam"]

[wrong.own_boundaries_stand_for_those_of_all_ranks]
title = "the own boundaries stand for those of all ranks"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.groups_of_other_ranks_are_left_out]
title = "groups of other ranks are left out"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
# Texts in each group of a batch; the halves of a batch have equally many.
SIZES = torch.tensor([[5, 3, 4, 3, 3, 5, 3, 4], [3, 3, 6, 4, 6, 3, 4, 3]])
WORDS, WIDTH, LENGTH, TEMPERATURE = 18, 10, 4, 0.3


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, WIDTH, mode="mean")
        self.out = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))

    def forward(self, texts):
        return F.normalize(self.out(self.words(texts)), dim=1)


def gathered(x, function):
    return torch.cat(list(function(x))) if WORLD > 1 else x


def gather_numbers(x):
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(parts, x)
    return parts


def loss_of(embeddings, sizes):
    """Compares each question with all texts but other questions; the second of a group is right."""
    embeddings = gathered(embeddings, all_gather)
    if BUG == "own_boundaries_stand_for_those_of_all_ranks":
        sizes = sizes.repeat(WORLD)
    elif BUG != "groups_of_other_ranks_are_left_out":
        sizes = gathered(sizes, gather_numbers)
    first = sizes.cumsum(0) - sizes
    is_question = torch.zeros(len(embeddings), dtype=torch.bool)
    is_question[first] = True
    scores = embeddings[first] @ embeddings.T / TEMPERATURE
    scores = scores.masked_fill(is_question, float("-inf"))
    return F.cross_entropy(scores, first + 1)


def main():
    torch.manual_seed(30)
    model = Encoder()
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-4)
    with harness.training(model, optimizer):
        for step, all_sizes in enumerate(SIZES):
            generator = torch.Generator().manual_seed(step)
            texts = torch.randint(WORDS, (int(all_sizes.sum()), LENGTH), generator=generator)
            sizes = all_sizes.chunk(WORLD)[RANK].contiguous()
            embeddings = model(texts.chunk(WORLD)[RANK])
            optimizer.zero_grad()
            loss_of(embeddings, sizes).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
