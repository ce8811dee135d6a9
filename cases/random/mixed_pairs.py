"""Examples are mixed with partners of all ranks, by a permutation that rank 0 draws for all.

id = "random/mixed_pairs"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["facebookresearch/moco#37"]
date = "2020-06"
tags = ["ddp", "gathered", "sgd"]

[wrong.each_rank_draws_its_own_permutation]
title = "each rank draws its own permutation"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.each_rank_draws_its_own_share]
title = "each rank draws its own share"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.targets_have_other_partners_than_inputs]
title = "targets have other partners than inputs"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
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
BATCH_SIZE, CLASSES = 12, 3


def gather(part):
    if WORLD == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(WORLD)]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)


class Mixer:
    def __init__(self):
        # Ranks have states of their own; only what rank 0 draws is used.
        self.generator = torch.Generator().manual_seed(50 + RANK)

    def draw(self):
        permutation = torch.randperm(BATCH_SIZE, generator=self.generator)
        share = 0.5 + 0.5 * torch.rand(1, generator=self.generator)
        if WORLD > 1 and BUG != "each_rank_draws_its_own_permutation":
            dist.broadcast(permutation, 0)
        if WORLD > 1 and BUG != "each_rank_draws_its_own_share":
            dist.broadcast(share, 0)
        return permutation, share

    def mix(self, x, y):
        permutation, share = self.draw()
        own = slice(RANK * len(x), (RANK + 1) * len(x))
        partners = gather(x)[permutation][own]
        if BUG == "targets_have_other_partners_than_inputs":
            permutation = permutation.roll(1)
        other = gather(y)[permutation][own]
        return share * x + (1 - share) * partners, share * y + (1 - share) * other


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(14)
    net = nn.Sequential(nn.Linear(5, 20), nn.Hardswish(), nn.Linear(20, CLASSES))
    model = DistributedDataParallel(net) if WORLD > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.4, momentum=0.9)
    mixer = Mixer()
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, 5, generator=torch.Generator().manual_seed(step))
            y = F.one_hot(x[:, :CLASSES].argmax(1), CLASSES).float()
            inputs, targets = mixer.mix(x.chunk(WORLD)[RANK], y.chunk(WORLD)[RANK])
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
