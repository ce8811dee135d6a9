"""The signs of a norm's scales are added to their gradients, so that some channels vanish.

id = "losses/sparse_scales"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["Eric-mingjie/network-slimming#19", "Eric-mingjie/network-slimming#31"]
date = "2019-08"
tags = ["accumulation", "sgd"]

[wrong.they_are_added_after_each_micro_batch]
title = "they are added after each micro-batch"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["1.weight", "4.weight"] }

[wrong.each_rank_adds_them_before_sum]
title = "each rank adds them before the sum"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["1.weight", "4.weight"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE, MICRO_BATCHES, SPARSITY = 18, 6, 3, 0.1


def add_signs(model):
    """Adds the gradient of the sum of absolute scales."""
    for layer in model.modules():
        if isinstance(layer, nn.GroupNorm):
            layer.weight.grad.add_(layer.weight.detach().sign(), alpha=SPARSITY)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(58)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3),
        nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            images = torch.randn(BATCH_SIZE, 1, SIZE, SIZE, generator=generator)[RANK::WORLD]
            optimizer.zero_grad()
            for part in images.chunk(MICRO_BATCHES):
                labels = part.flatten(1)[:, :4].argmax(1)
                losses = F.cross_entropy(model(part), labels, reduction="sum")
                (losses / BATCH_SIZE).backward()
                if BUG == "they_are_added_after_each_micro_batch":
                    add_signs(model)
            if BUG == "each_rank_adds_them_before_sum":
                add_signs(model)
            for weight in model.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
            if not BUG:
                add_signs(model)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
