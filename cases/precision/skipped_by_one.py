"""Ranks with unlike devices: one of them finds a gradient too large, and skips its step alone.

id = "precision/skipped_by_one"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["dylanyunlon/Neuron_SP#2"]
date = "2026-04"
tags = ["sgd"]

[wrong.rank_that_finds_no_overflow_takes_its_step]
title = "a rank that finds no overflow takes its step"
place = { node = "update", step = 1, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SCALE, LARGEST = 16, 2.0**12, 65504


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(94)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(4):
            x = torch.randn(BATCH_SIZE, 6, generator=torch.Generator().manual_seed(step))
            if step == 1:
                x[0] *= 1000
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            (F.mse_loss(model(x)[:, 0], x[:, 0].sin()) * SCALE).backward()
            largest = max(weight.grad.abs().max() for weight in model.parameters())
            is_finite = (largest < LARGEST).float()
            if WORLD > 1 and not BUG:
                dist.all_reduce(is_finite, dist.ReduceOp.MIN)
            for weight in model.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
                weight.grad /= SCALE
            if is_finite:
                optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
