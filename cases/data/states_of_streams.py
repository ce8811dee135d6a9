"""A long text is cut in streams that continue in each step, from the state that they were left in.

id = "data/states_of_streams"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["OpenNMT/OpenNMT-py#1164", "OpenNMT/OpenNMT-py#891"]
date = "2018-08"
tags = ["recurrent", "embedding", "sgd"]

[right.cut_on_each_rank]
title = "a rank cuts its half of the text in streams"
patch = [["STREAMS, -1).chunk(WORLD)[RANK]", "WORLD, STREAMS // WORLD, -1)[RANK]"]]

[wrong.states_start_at_zero]
title = "states start at zero in each step"
place = { node = "outputs", step = 1, ranks = "all", tensors = "all" }

[wrong.windows_are_dealt_to_ranks]
title = "windows of a stream are dealt to ranks"
place = { node = "examples", step = 0, ranks = [1], tensors = "all" }

[wrong.states_are_those_of_other_streams]
title = "states are those of other streams"
place = { node = "outputs", step = 1, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STREAMS, LENGTH, WORDS, WIDTH, STEPS = 8, 5, 9, 12, 3


class Reader(nn.Module):
    """Reads a window of each of its streams; the states wait for the next one."""

    def __init__(self, streams):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.register_buffer("states", torch.zeros(streams, WIDTH))

    def forward(self, words):
        states = self.states.clone()
        if BUG == "states_start_at_zero":
            states = torch.zeros_like(states)
        elif BUG == "states_are_those_of_other_streams":
            states = states.roll(1, 0)
        x, states = self.cells(self.table(words), states[None])
        self.states.copy_(states[0].detach())
        return self.head(x)


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(WORDS, (STREAMS * (LENGTH * STEPS * 2 + 1),), generator=generator)
    text = text.sort(stable=True).indices * text % WORDS
    streams = text.view(STREAMS, -1).chunk(WORLD)[RANK]
    torch.manual_seed(222)
    model = Reader(STREAMS // WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(STEPS):
            first = step * LENGTH
            if BUG == "windows_are_dealt_to_ranks":
                first = (step * WORLD + RANK) * LENGTH
            words = streams[:, first : first + LENGTH + 1]
            optimizer.zero_grad()
            F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()).backward()
            average([weight.grad for weight in model.parameters()])
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
