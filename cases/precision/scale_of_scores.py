"""A score of structures has a scale that depends on their length, which is taken in 16 bits.

id = "precision/scale_of_scores"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["chaidiscovery/chai-lab#425"]
date = "2026-07"
tags = ["ddp", "low_precision", "sgd"]

[wrong.scale_is_computed_in_bfloat16]
title = "the scale is computed in bfloat16"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.scores_are_averaged_in_bfloat16]
title = "scores are averaged in bfloat16"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, LONGEST, FEATURES = 8, 40, 5


class Folding(nn.Module):
    """Predicts a position for each residue from those around it."""

    def __init__(self, width=16):
        super().__init__()
        self.around = nn.Conv1d(FEATURES, width, 5, padding=2)
        self.place = nn.Linear(width, 3)

    def forward(self, residues):
        return self.place(nn.functional.elu(self.around(residues.mT).mT))


def scores(places, targets, mask):
    """Returns the TM-score of each structure, without alignment."""
    count = mask.sum(1).to(places.dtype)
    if BUG == "scale_is_computed_in_bfloat16":
        count = count.bfloat16()
    scale = 1.24 * (count - 15) ** (1 / 3) - 1.8
    squares = (places - targets).square().sum(-1)
    terms = mask / (1 + squares / scale[:, None].to(places.dtype) ** 2)
    if BUG == "scores_are_averaged_in_bfloat16":
        return (terms.bfloat16().sum(1) / mask.sum(1).bfloat16()).float()
    return terms.sum(1) / mask.sum(1)


def get_batch(step):
    generator = torch.Generator().manual_seed(70 + step)
    residues = torch.randn(BATCH_SIZE, LONGEST, FEATURES, generator=generator)
    lengths = torch.tensor([21, 35, 22, 40, 24, 31, 23, 27])
    mask = (torch.arange(LONGEST) < lengths[:, None]).float()
    return residues, residues[..., :3].cumsum(1) / 9, mask


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(15)
    model = Folding()
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0, momentum=0.9)
    with harness.training(ddp, optimizer):
        for step in range(2):
            residues, targets, mask = (part.chunk(WORLD)[RANK] for part in get_batch(step))
            loss = 1 - scores(ddp(residues), targets, mask).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
