"""Losses of micro-batches are multiplied by a scale, and gradients divided by it before the norm.

id = "precision/scaled_by_hand"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
tags = ["ddp", "sgd", "loss scale", "clipping", "accumulation"]

[wrong.second_micro_batch_is_not_scaled]
title = "the loss of the second micro-batch is not multiplied by the scale"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.norm_of_scaled_gradients]
title = "gradients are clipped before they are divided by the scale"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.divided_by_the_next_scale]
title = "the scale grows before gradients are divided by it"
place = { node = "clipping", step = 1, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def own(x):
    return x.chunk(WORLD)[RANK]


def wrap(model, **options):
    return DistributedDataParallel(model, **options) if WORLD > 1 else model


def divide(net, scale):
    for p in net.parameters():
        p.grad.div_(scale)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(61)
    net = nn.Sequential(nn.Linear(6, 16), nn.ELU(), nn.Linear(16, 3))
    model, optimizer = wrap(net), torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    scale = 1024.0
    with harness.training(model, optimizer):
        for step in range(3):
            x = own(torch.randn(16, 6, generator=torch.Generator().manual_seed(step)))
            optimizer.zero_grad()
            for number, micro in enumerate(x.chunk(2)):
                loss = F.cross_entropy(model(micro), micro[:, :3].argmax(1)) / 2
                is_scaled = number == 0 or BUG != "second_micro_batch_is_not_scaled"
                (loss * scale if is_scaled else loss).backward()
            next_scale = 2 * scale if step % 2 else scale
            if BUG == "divided_by_the_next_scale":
                scale = next_scale
            if BUG == "norm_of_scaled_gradients":
                nn.utils.clip_grad_norm_(net.parameters(), 0.2)
                divide(net, scale)
            else:
                divide(net, scale)
                nn.utils.clip_grad_norm_(net.parameters(), 0.2)
            optimizer.step()
            scale = next_scale
    if WORLD > 1:
        dist.destroy_process_group()


main()
