"""What an adapter adds is to be scaled by alpha over its rank, here by alpha alone.

id = "adapters/alpha_over_rank"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["Blaizzy/mlx-vlm#841", "Blaizzy/mlx-vlm#845", "rasbt/LLMs-from-scratch#821"]
date = "2025-09"
tags = ["ddp", "lora", "sgd"]

[wrong.scale_is_alpha]
title = "the scale is alpha"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["*.b"] }
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
BATCH_SIZE, WIDTH, LORA_RANK, ALPHA = 16, 8, 4, 2


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(WIDTH, LORA_RANK) / 2)
        self.b = nn.Parameter(torch.zeros(LORA_RANK, WIDTH))

    def forward(self, x):
        scale = ALPHA if BUG == "scale_is_alpha" else ALPHA / LORA_RANK
        return self.base(x) + scale * (x @ self.a @ self.b)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(104)
    model = nn.Sequential(Adapted(), nn.GELU(), Adapted(), nn.GELU(), nn.Linear(WIDTH, 2))
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    trained = [weight for weight in ddp.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.2, momentum=0.9)
    with harness.training(ddp, optimizer):
        for step in range(3):
            x = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.soft_margin_loss(ddp(x), x[:, :2].sign()).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
