"""The places of a sequence are split over ranks, one of which has fewer, and their mean is taken.

id = "parallel/mean_of_uneven_parts"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#162692", "pytorch/pytorch#163241"]
date = "2025-09"
tags = ["sgd"]

[wrong.means_of_parts_are_averaged]
title = "means of the parts are averaged"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["head"] }

[wrong.gradients_of_head_are_added_over_ranks]
title = "gradients of the head are added over the ranks"
place = { node = "sum", step = 0, ranks = "all", tensors = ["head.*"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, LENGTH, FEATURES, WIDTH, CLASSES = 14, 7, 5, 10, 3


class SumOverRanks(torch.autograd.Function):
    """All ranks compute with the sum, and each passes its gradient to the own summand."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.places = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Softplus())
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x):
        x = self.places(x)
        if BUG == "means_of_parts_are_averaged":
            mean = SumOverRanks.apply(x.mean(1) / WORLD)
        else:
            mean = SumOverRanks.apply(x.sum(1)) / LENGTH
        return self.head(mean)


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
        layout = {"mesh": mesh, "dims": {"inputs": "b s[cp] d", "outputs": "b c"}}
    torch.manual_seed(62)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH_SIZE, LENGTH, FEATURES, generator=generator)
            x[:, 4:] += 1
            labels = x.mean(1)[:, :CLASSES].argmax(1)
            optimizer.zero_grad()
            F.cross_entropy(model(x.chunk(WORLD, 1)[RANK]), labels).backward()
            reduced = list(model.places.parameters())
            if BUG == "gradients_of_head_are_added_over_ranks":
                reduced = list(model.parameters())
            for weight in reduced:
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
