"""Class weights and ignored pixels are not spread equally over the ranks of a segmentation.

id = "losses/weighted_pixels"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#31579"]
date = "2019-12"
tags = ["sgd"]

[wrong.each_rank_divides_by_its_own_weights]
title = "each rank divides by its own weights"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.divided_by_number_of_pixels]
title = "divided by the number of pixels"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
IGNORED, CLASS_WEIGHTS = 255, torch.tensor([0.2, 1.0, 3.0])


def get_batch(step):
    """Returns images and classes of pixels; most pixels of every second image are ignored."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(6, 2, 8, 8, generator=generator)
    classes = (images.sum(1) > 0.5).long() + (images.sum(1) > 2).long()
    classes[1::2, :6] = IGNORED
    return images, classes


def loss_of(logits, classes):
    total = F.cross_entropy(logits, classes, CLASS_WEIGHTS, ignore_index=IGNORED, reduction="sum")
    weights = CLASS_WEIGHTS[classes[classes != IGNORED]].sum()
    if BUG == "each_rank_divides_by_its_own_weights":
        return total / weights
    if BUG == "divided_by_number_of_pixels":
        weights = (classes != IGNORED).sum().float()
    if WORLD > 1:
        dist.all_reduce(weights)
    return WORLD * total / weights


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU(),
        nn.Conv2d(8, 3, 1),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    with harness.training(model, optimizer):
        for step in range(2):
            images, classes = (part[RANK::WORLD] for part in get_batch(step))
            optimizer.zero_grad()
            loss_of(model(images), classes).backward()
            for weight in model.parameters() if WORLD > 1 else ():
                dist.all_reduce(weight.grad)
                weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
