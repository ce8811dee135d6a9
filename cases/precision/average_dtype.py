"""An average of the weights is kept in 16 bits, which do not hold its small changes.

id = "precision/average_dtype"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["d8ahazard/sd_dreambooth_extension#1415", "lucidrains/ema-pytorch#18"]
date = "2023-12"
tags = ["ddp", "low_precision", "adam"]

[wrong.average_is_kept_in_bfloat16]
title = "the average is kept in bfloat16"
place = { node = "update", step = 0, ranks = "all", tensors = ["average.*"] }

[wrong.average_takes_16_bit_copies_of_weights]
title = "the average takes 16-bit copies of the weights"
place = { node = "update", step = 0, ranks = "all", tensors = ["average.*"] }

[wrong.average_of_rank_0_alone_is_in_bfloat16]
title = "the average of rank 0 alone is in bfloat16"
place = { node = "update", step = 0, ranks = [0], tensors = ["average.*"] }
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Average(nn.Module):
    """A moving average of the weights of a model."""

    def __init__(self, model, decay=0.5):
        super().__init__()
        self.model, self.decay = copy.deepcopy(model).requires_grad_(False), decay
        is_own = BUG == "average_of_rank_0_alone_is_in_bfloat16" and RANK == 0
        self.rounds = is_own or BUG == "average_is_kept_in_bfloat16"

    @torch.no_grad()
    def update(self, model):
        for average, weight in zip(self.model.parameters(), model.parameters(), strict=True):
            if BUG == "average_takes_16_bit_copies_of_weights":
                weight = weight.bfloat16().float()
            average.lerp_(weight, 1 - self.decay)
            if self.rounds:
                average.copy_(average.bfloat16())


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv1d(2, 8, 4, stride=2), nn.ConvTranspose1d(8, 2, 4, stride=2)

    def forward(self, x):
        return self.up(nn.functional.silu(self.down(x)))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(8)
    model = Denoiser()
    average = Average(model)
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-3)
    with harness.training(wrapped, optimizer, others={"average": average}):
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            clean = torch.randn(12, 2, 10, generator=generator).cumsum(-1)
            noise = torch.randn(12, 2, 10, generator=generator)
            clean, noise = clean[RANK::WORLD], noise[RANK::WORLD]
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(clean + noise), noise).backward()
            optimizer.step()
            average.update(model)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
