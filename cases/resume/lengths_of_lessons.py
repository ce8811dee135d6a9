"""Texts become longer with the steps of a training, also where a run is resumed.

id = "resume/lengths_of_lessons"
framework = "torch"
processes = 2
steps = 5
mode = "resume"
references = ["Unity-Technologies/ml-agents#2993", "Unity-Technologies/ml-agents#223"]
date = "2017-12"
tags = ["ddp", "embedding", "adam"]

[wrong.lessons_start_again]
title = "lessons start again"
place = { node = "examples", step = 3, ranks = "all", tensors = "all" }

[wrong.first_batch_has_first_length]
title = "the first batch has the first length"
place = { node = "examples", step = 3, ranks = "all", tensors = "all" }
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
BATCH_SIZE, WORDS, WIDTH, STEPS, SAVED_STEPS = 8, 9, 12, 5, 3


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, words):
        x = self.table(words)
        means = x.cumsum(1) / torch.arange(1, words.shape[1] + 1)[:, None]
        return self.head(x + torch.tanh(self.mix(means)))


def length_of(step, first):
    """Returns the length of the lesson of a step, of a run that starts at the first one."""
    if BUG == "lessons_start_again":
        step -= first
    elif BUG == "first_batch_has_first_length" and step == first:
        step = 0
    return 4 + 2 * (step // 2)


def main():
    save, load = os.environ.get("SAVE"), os.environ.get("LOAD")
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(226)
    model = Reader()
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.02, eps=1e-3)
    first = 0
    if load:
        state = torch.load(load)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    last = SAVED_STEPS if save else STEPS
    with harness.training(ddp, optimizer):
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            words = torch.randint(WORDS, (BATCH_SIZE, 9), generator=generator)
            words = words[:, : length_of(step, first) + 1].chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.cross_entropy(ddp(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()).backward()
            optimizer.step()
    if save and RANK == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": last}
        torch.save(state, save)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
