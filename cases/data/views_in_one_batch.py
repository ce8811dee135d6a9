"""Each picture is in a batch twice, cut in two ways, and the ranks share these views.

id = "data/views_in_one_batch"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["minhoooo1/CatMAE#4", "galilai-group/stable-pretraining#222"]
date = "2023-12"
tags = ["ddp", "loader", "sgd"]

[wrong.views_are_shuffled_apart]
title = "views are shuffled apart"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }

[wrong.views_are_not_divided_among_ranks]
title = "views are not divided among the ranks"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PICTURES, VIEWS, SIZE, BATCH_SIZE = 32, 2, 6, 16


class Views(Dataset):
    """Item i is view i % 2 of picture i // 2: a part of it, at a place that belongs to the view."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.pictures = torch.randn(PICTURES, 1, SIZE + 3, SIZE + 3, generator=generator)

    def __len__(self):
        return PICTURES * VIEWS

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        top, left = torch.randint(4, (2,), generator=generator).tolist()
        return self.pictures[index // VIEWS][:, top : top + SIZE, left : left + SIZE]


class Repeated(Sampler):
    def __iter__(self):
        generator = torch.Generator().manual_seed(2)
        if BUG == "views_are_shuffled_apart":
            indices = torch.randperm(PICTURES * VIEWS, generator=generator)
        else:
            pictures = torch.randperm(PICTURES, generator=generator)
            indices = (VIEWS * pictures[:, None] + torch.arange(VIEWS)).flatten()
        if BUG == "views_are_not_divided_among_ranks":
            return iter(indices.tolist())
        return iter(indices[RANK::WORLD].tolist())

    def __len__(self):
        return PICTURES * VIEWS // WORLD


def main():
    torch.manual_seed(46)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, 2, 1), nn.SiLU(), nn.ConvTranspose2d(6, 1, 4, 2, 1), nn.Hardtanh()
    )
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.8, nesterov=True)
    loader = DataLoader(Views(), BATCH_SIZE // WORLD, sampler=Repeated())
    with harness.training(model, optimizer):
        for step, views in enumerate(loader):
            if step == 2:
                break
            optimizer.zero_grad()
            F.smooth_l1_loss(model(views), views.tanh()).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
