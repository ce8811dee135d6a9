"""A detector's loss is multiplied by the batch size, and by the ranks, as DDP will divide by them.

id = "losses/times_batch_size"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["ultralytics/yolov5#8301", "ultralytics/yolov5#2704", "ultralytics/ultralytics#18616"]
date = "2021-04"
tags = ["ddp", "sgd"]

[wrong.it_is_not_multiplied_by_ranks]
title = "it is not multiplied by the ranks"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.it_is_multiplied_by_batch_of_all_ranks_too]
title = "it is multiplied by the batch of all ranks, too"
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
BATCH_SIZE, SIZE = 8, 8


class Detector(nn.Module):
    """Gives each cell of a picture a box and the chance that it has an object."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.SiLU())
        self.boxes, self.objects = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x):
        x = self.features(x)
        return torch.cat([self.boxes(x).sigmoid(), self.objects(x)], 1)


def loss_of(outputs, boxes, objects):
    errors = (outputs[:, :4] - boxes).abs().mean(1)
    loss = 0.5 * errors.mean() + F.binary_cross_entropy_with_logits(outputs[:, 4], objects)
    loss = loss * len(outputs)
    if BUG == "it_is_multiplied_by_batch_of_all_ranks_too":
        loss = loss * WORLD
    return loss


def main():
    torch.manual_seed(55)
    model = Detector()
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            images = torch.randn(BATCH_SIZE, 1, SIZE, SIZE, generator=generator)
            images = images.chunk(WORLD)[RANK]
            corners = [images[:, 0, top::2, left::2] for top in (0, 1) for left in (0, 1)]
            boxes = torch.stack(corners, 1).sigmoid()
            loss = loss_of(model(images), boxes, (sum(corners) > 1).float())
            if BUG != "it_is_not_multiplied_by_ranks":
                loss = loss * WORLD
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
