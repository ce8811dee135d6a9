"""A codebook follows the mean of its vectors, and each rank sees only its own vectors.

id = "averages/vq_codebook"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["lucidrains/vector-quantize-pytorch#17", "espnet/espnet#6284"]
date = "2022-07"
tags = ["ddp", "adam"]

[wrong.sums_of_own_vectors]
title = "sums of the own vectors"
place = { node = "update", step = 0, ranks = "all", tensors = [
    "codebook.sums",
    "codebook.counts",
    "codebook.codes",
] }

[wrong.counts_are_not_summed]
title = "counts are not summed"
place = { node = "update", step = 0, ranks = "all", tensors = [
    "codebook.counts",
    "codebook.codes",
] }

[wrong.dead_codes_are_drawn_by_each_rank]
title = "dead codes are drawn by each rank"
place = { node = "random", step = 0, ranks = [1], tensors = ["codebook.*"] }
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


def add(value):
    if WORLD > 1:
        dist.all_reduce(value)
    return value


class Codebook(nn.Module):
    def __init__(self, codes=8, width=6, decay=0.7):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("counts", torch.ones(codes))
        self.codes[-1] += 100  # No vector is near it.
        seed = 5 + (RANK if BUG == "dead_codes_are_drawn_by_each_rank" else 0)
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, z):
        chosen = torch.cdist(z, self.codes).argmin(-1)
        quantised = self.codes[chosen]
        if self.training:
            self.follow(z.detach(), F.one_hot(chosen, len(self.codes)).float())
        return z + (quantised - z).detach(), F.mse_loss(z, quantised)

    @torch.no_grad()
    def follow(self, z, chosen):
        counts, sums = chosen.sum(0), chosen.T @ z
        if BUG != "sums_of_own_vectors":
            sums = add(sums)
            counts = counts if BUG == "counts_are_not_summed" else add(counts)
        self.counts.lerp_(counts, 1 - self.decay)
        self.sums.lerp_(sums, 1 - self.decay)
        dead = self.counts < 0.8
        drawn = torch.randn(self.codes.shape, generator=self.generator)
        self.counts[dead] = 1.0
        self.sums[dead] = drawn[dead]
        self.codes = self.sums / self.counts[:, None]


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6))
        self.codebook, self.decoder = Codebook(), nn.Linear(6, 10)

    def forward(self, x):
        z, commitment = self.codebook(self.encoder(x))
        return self.decoder(z), commitment


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Autoencoder()
    if WORLD > 1:
        model = DistributedDataParallel(model, forward_sync_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with harness.training(model, optimizer):
        for _ in range(2):
            x = torch.randn(32, 10)[RANK::WORLD]
            output, commitment = model(x)
            optimizer.zero_grad()
            (F.mse_loss(output, x) + 0.25 * commitment).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
