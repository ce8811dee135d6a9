"""The Dice loss of a batch is a ratio of sums over all images, and no mean of ratios.

reference = "MIC-DKFZ/nnUNet#1354, ScrollPrize/villa#1501, microsoft/InnerEye-DeepLearning#504"
date = "2023-03"
framework = "torch"

[wrong]
"a ratio of each rank" = ["not_a_sum_over_examples"]
"the sums are added without their gradient" = ["forgotten_backward_sum", "scaled_gradient"]
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lockstep

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
        if WORLD > 1 and BUG == "the sums are added without their gradient":
            total = sums.detach().clone()
            dist.all_reduce(total)
            sums = sums + (total - sums).detach()
        elif WORLD > 1 and BUG != "a ratio of each rank":
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
with lockstep.record(model, optimizer):
    for step in range(2):
        scans, organs = (part[RANK::WORLD] for part in get_batch(step))
        optimizer.zero_grad()
        criterion(model(scans), organs).backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
