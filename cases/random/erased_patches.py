"""A vision transformer is trained with patches erased at random, other ones in each picture.

id = "random/erased_patches"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["facebookresearch/deit#150"]
date = "2022-03"
tags = ["ddp", "adam"]

[wrong.all_ranks_draw_with_same_seed]
title = "all ranks draw with the same seed"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }
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
BATCH_SIZE, PATCHES, SIZE, WIDTH = 12, 9, 5, 16


class Vit(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, 4)
        self.places = nn.Parameter(torch.randn(PATCHES, WIDTH) / 2)
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, patches):
        x = self.enter(patches) + self.places
        queries, keys, values = self.mix(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(queries, keys, values)
        return self.leave(x.mean(1))


def erased(pictures, ids, step):
    """Returns pictures without some patches, drawn by step and number of the picture."""
    pictures = pictures.clone()
    for place, number in enumerate(ids.tolist()):
        if BUG == "all_ranks_draw_with_same_seed":
            number = place
        generator = torch.Generator().manual_seed(1000 * step + number)
        pictures[place, torch.rand(PATCHES, generator=generator) < 0.4] = 0
    return pictures


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(96)
    model = Vit()
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.02, eps=1e-3)
    with harness.training(ddp, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            pictures = torch.randn(BATCH_SIZE, PATCHES, SIZE, generator=generator)
            ids = torch.arange(BATCH_SIZE).chunk(WORLD)[RANK]
            harness.note("ids", ids + step * BATCH_SIZE)
            pictures = pictures[ids]
            labels = pictures.mean(1)[:, :4].argmax(1)
            optimizer.zero_grad()
            F.cross_entropy(ddp(erased(pictures, ids, step)), labels).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
