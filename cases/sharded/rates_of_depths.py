"""Rates shrink with the depth of a layer, which is read from the names of its weights.

id = "sharded/rates_of_depths"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["google-research/electra#64", "google-research/electra#51"]
date = "2020-05"
tags = ["ddp", "adam"]

[right.groups_are_reversed]
title = "groups are in reverse order"
patch = [["list(groups_of(model))", "list(groups_of(model))[::-1]"]]

[wrong.names_within_wrapper_have_no_depth]
title = "names within the wrapper have no depth"
place = { node = "update", step = 0, ranks = "all", tensors = ["enter.*", "blocks.*"] }

[wrong.head_is_two_layers_above_last_block]
title = "the head is two layers above the last block"
place = { node = "update", step = 0, ranks = "all", tensors = ["enter.*", "blocks.*"] }
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
BATCH_SIZE, SIZE, WIDTH, BLOCKS, RATE, DECAY = 16, 6, 18, 3, 0.02, 0.6


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def depth_of(name):
    """Returns 0 for what enters, and the depth of the head for what has no other."""
    if BUG != "names_within_wrapper_have_no_depth":
        name = name.removeprefix("module.")
    kind, number, *_ = name.split(".")
    if kind == "blocks":
        return 1 + int(number)
    return 0 if kind == "enter" else BLOCKS + 1


def groups_of(model):
    top = BLOCKS + (2 if BUG == "head_is_two_layers_above_last_block" else 1)
    for name, weight in model.named_parameters():
        depth = top if depth_of(name) == BLOCKS + 1 else depth_of(name)
        yield {"params": [weight], "lr": RATE * DECAY ** (top - depth)}


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(201)
    model = Encoder()
    if WORLD > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(list(groups_of(model)), eps=1e-3)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, SIZE, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x[:, :3] * x[:, 3:]).argmax(1)).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
