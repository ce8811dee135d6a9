"""The Dice loss of a batch is a ratio of sums over all images, and no mean of ratios.

id = "losses/batch_dice"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "MIC-DKFZ/nnUNet#1354",
    "ScrollPrize/villa#1501",
    "microsoft/InnerEye-DeepLearning#504",
]
date = "2023-03"
tags = ["ddp", "sgd"]

[wrong.ratio_of_each_rank]
title = "a ratio of each rank"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.sums_are_added_without_their_gradient]
title = "the sums are added without their gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ORGANS = 3


class UNet(nn.Module):
    """One level down and up again."""

    def __init__(self):
        super().__init__()
        self.enter, self.down = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 8, 2, stride=2)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.leave = nn.Conv2d(12, ORGANS, 1)

    def forward(self, scans):
        x = F.leaky_relu(self.enter(scans))
        return self.leave(torch.cat([x, F.leaky_relu(self.up(F.leaky_relu(self.down(x))))], 1))


class DiceLoss(nn.Module):
    def forward(self, logits, organs):
        chances, targets = logits.softmax(1), F.one_hot(organs, ORGANS).permute(0, 3, 1, 2)
        dims = (0, 2, 3)
        both, either = (chances * targets).sum(dims), (chances + targets).sum(dims)
        sums = torch.stack([both, either])
        if WORLD > 1 and BUG == "sums_are_added_without_their_gradient":
            total = sums.detach().clone()
            dist.all_reduce(total)
            sums = sums + (total - sums).detach()
        elif WORLD > 1 and BUG != "ratio_of_each_rank":
            sums = all_reduce(sums)
        return 1 - (2 * sums[0] / (sums[1] + 1e-5)).mean()


def get_batch(step):
    """Returns scans in which every second patient has a small organ."""
    generator = torch.Generator().manual_seed(40 + step)
    scans = torch.randn(6, 1, 8, 8, generator=generator)
    scans[::2] -= 1.0
    return scans, torch.bucketize(scans[:, 0], torch.tensor([0.0, 1.0]))


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model, criterion = UNet(), DiceLoss()
if WORLD > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.95, weight_decay=1e-3)
with harness.training(model, optimizer):
    for step in range(2):
        scans, organs = (part[RANK::WORLD] for part in get_batch(step))
        optimizer.zero_grad()
        criterion(model(scans), organs).backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
