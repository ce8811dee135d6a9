"""Features of all ranks meet, and the gradient of the gathering is reduced into a copy.

id = "gathered/discarded_reduction"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#120582"]
date = "2024-02"
tags = ["ddp", "gathered", "sgd"]

[wrong.buffer_stays_as_it_was]
title = "the buffer stays as it was"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.gradients_of_other_ranks_are_left_out]
title = "gradients of other ranks are left out"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }
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
BATCH_SIZE, SIZE, WIDTH = 12, 6, 8


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if WORLD == 1:
            return x.view_as(x)
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        if BUG == "buffer_stays_as_it_was":
            return torch.zeros_like(gradient.chunk(WORLD)[RANK])
        gradient = gradient.clone()
        if WORLD > 1 and BUG != "gradients_of_other_ranks_are_left_out":
            dist.all_reduce(gradient)
        return gradient.chunk(WORLD)[RANK]


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(110)
    model = nn.Sequential(nn.Linear(SIZE, 16), nn.GELU(), nn.Linear(16, WIDTH))
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3, momentum=0.9)
    with harness.training(ddp, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, SIZE, generator=torch.Generator().manual_seed(step))
            features = F.normalize(ddp(x.chunk(WORLD)[RANK]), dim=-1)
            similar = features @ Gather.apply(features).T
            wanted = (x @ x.T / SIZE).tanh().chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.mse_loss(similar, wanted).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
