"""A detector's losses are divided by the number of positive places, which each rank counts alone.

id = "losses/positive_places"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["open-mmlab/mmdetection#5988", "facebookresearch/detr#354", "nickgkan/butd_detr#48"]
date = "2021-08"
tags = ["fsdp2", "sgd"]

[wrong.places_of_own_images]
title = "places of the own images"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.number_is_not_divided_by_ranks]
title = "the number is not divided by the ranks"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.only_boxes_are_divided_by_number_of_all]
title = "only boxes are divided by the number of all"
place = { node = "loss", step = 0, ranks = "all", tensors = ["trunk.*", "classes.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CLASSES, ALPHA, GAMMA = 4, 0.25, 2.0


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()
        )
        self.classes, self.boxes = nn.Conv2d(8, CLASSES, 1), nn.Conv2d(8, 4, 1)

    def forward(self, images):
        x = self.trunk(images)
        return self.classes(x).permute(0, 2, 3, 1), self.boxes(x).permute(0, 2, 3, 1)


def focal_loss(logits, targets):
    chances = logits.sigmoid()
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    missed = targets * (1 - chances) + (1 - targets) * chances
    return ((ALPHA * targets + (1 - ALPHA) * (1 - targets)) * missed**GAMMA * losses).sum()


def loss_of(logits, boxes, targets, true_boxes):
    """Returns the loss of the rank's images; FSDP averages gradients over ranks."""
    positive = targets.sum(-1) > 0
    own = number = positive.sum().float()
    if WORLD > 1 and BUG != "places_of_own_images":
        number = own.clone()
        dist.all_reduce(number)
        if BUG != "number_is_not_divided_by_ranks":
            number /= WORLD
    of_classes = own if BUG == "only_boxes_are_divided_by_number_of_all" else number
    of_boxes = F.l1_loss(boxes[positive], true_boxes[positive], reduction="sum")
    return focal_loss(logits, targets) / of_classes + of_boxes / number


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = Detector()
images, true_boxes = torch.randn(2, 6, 2, 8, 8), torch.rand(2, 6, 8, 8, 4)
# Every second image shows a crowd.
crowded = torch.tensor([0.05, 0.5]).repeat(3).view(1, 6, 1, 1)
is_object = torch.rand(2, 6, 8, 8) < crowded
targets = F.one_hot(torch.randint(CLASSES, (2, 6, 8, 8)), CLASSES) * is_object[..., None].float()
if WORLD > 1:
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
with harness.training(model, optimizer):
    for step in range(2):
        own = (step, slice(RANK, None, WORLD))
        optimizer.zero_grad()
        logits, boxes = model(images[own])
        loss_of(logits, boxes, targets[own], true_boxes[own]).backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
