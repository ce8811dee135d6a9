"""Both views of all ranks are gathered, and the mask of positives needs their order.

id = "gathered/order_of_views"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["Spijkervet/SimCLR#46"]
date = "2023-09"
tags = ["ddp", "gathered", "sgd"]

[wrong.all_first_views_are_taken_to_come_first]
title = "all first views are taken to come first"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.view_is_compared_with_itself_on_other_ranks]
title = "a view is compared with itself on other ranks"
place = { node = "loss", step = 0, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
IMAGES, TEMPERATURE = 6, 0.5


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 5, 3), nn.Linear(5 * 9, 8)

    def forward(self, views):
        """Takes views of the shape (images, 2, 1, 5, 5); returns (images, 2, 8)."""
        x = F.elu(self.conv(views.flatten(0, 1))).flatten(1)
        return F.normalize(self.out(x), dim=1).unflatten(0, (-1, 2))


def gather(z):
    """Returns the embeddings of all: first and second views of rank 0, then of rank 1."""
    first_and_second = torch.cat([z[:, 0], z[:, 1]])
    if WORLD == 1:
        return first_and_second
    return torch.cat(all_gather(first_and_second))


def contrast(z):
    count, total = len(z), len(z) * WORLD
    everything = gather(z)
    own = torch.cat([z[:, 0], z[:, 1]])
    places = torch.arange(2 * count)
    if BUG == "all_first_views_are_taken_to_come_first":
        image = places % count + RANK * count
        self_places = torch.where(places < count, image, image + total)
        partners = torch.where(places < count, image + total, image)
    else:
        self_places = places + 2 * count * RANK
        partners = (places + count) % (2 * count) + 2 * count * RANK
    if BUG == "view_is_compared_with_itself_on_other_ranks":
        self_places = places
    logits = own @ everything.T / TEMPERATURE
    logits = logits.scatter(1, self_places[:, None], -20.0)
    return F.cross_entropy(logits, partners)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(6)
    model = Projector()
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with harness.training(wrapped, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            images = torch.randn(IMAGES, 1, 1, 5, 5, generator=generator)
            views = images + 0.5 * torch.randn(IMAGES, 2, 1, 5, 5, generator=generator)
            loss = contrast(wrapped(views.chunk(WORLD)[RANK]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
