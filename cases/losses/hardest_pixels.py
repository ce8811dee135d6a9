"""Only the hardest pixels of a batch count, on whatever ranks their images are.

id = "losses/hardest_pixels"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["yu-changqian/TorchSeg#23", "CoinCheung/BiSeNet#63"]
date = "2019-02"
tags = ["ddp", "gathered", "sgd"]

[wrong.each_rank_takes_its_share_from_own_images]
title = "each rank takes its share from the own images"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.each_rank_takes_as_many_as_all_together]
title = "each rank takes as many as all together"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
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
BATCH_SIZE, SIZE, CLASSES = 8, 8, 4
HARDEST = BATCH_SIZE * SIZE * SIZE // 8


def loss_of(logits, classes):
    """Returns the own part of the mean over the hardest pixels, times the number of ranks."""
    losses = F.cross_entropy(logits, classes, reduction="none").flatten()
    if BUG == "each_rank_takes_its_share_from_own_images":
        return losses.topk(HARDEST // WORLD).values.mean()
    if BUG == "each_rank_takes_as_many_as_all_together":
        return losses.topk(min(HARDEST, len(losses))).values.mean()
    everything = losses.detach()
    if WORLD > 1:
        parts = [torch.empty_like(everything) for _ in range(WORLD)]
        dist.all_gather(parts, everything)
        everything = torch.cat(parts)
    limit = everything.topk(HARDEST).values[-1]
    return WORLD * losses[losses >= limit].sum() / HARDEST


def main():
    torch.manual_seed(54)
    model = nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(10, 10, 1),
        nn.ReLU(), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(10, CLASSES, 3, 1, 1),
    )  # fmt: skip
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            images = torch.randn(BATCH_SIZE, 3, SIZE, SIZE, generator=generator)
            images[: BATCH_SIZE // 2] *= 0.2  # Harder ones.
            classes = (images[:, 0] > images[:, 1]).long() + 2 * (images[:, 2] > 0).long()
            images, classes = images.chunk(WORLD)[RANK], classes.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            loss_of(model(images), classes).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
