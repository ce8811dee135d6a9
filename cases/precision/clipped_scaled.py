"""Gradients are clipped while they still have the factor of the loss scale.

id = "precision/clipped_scaled"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/examples#1196", "milesial/Pytorch-UNet#468", "huggingface/accelerate#641"]
date = "2022-08"
tags = ["clipping", "accumulation", "sgd"]

[wrong.clipped_before_scale_is_taken_out]
title = "clipped before the scale is taken out"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.scale_is_taken_out_in_each_micro_batch]
title = "the scale is taken out in each micro-batch"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.factor_is_taken_out_on_rank_0_only]
title = "the factor is taken out on rank 0 only"
place = { node = "gradient", step = 0, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SCALE, LIMIT, MICRO_BATCHES = 64.0, 0.2, 2


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(7, 15), nn.SELU(), nn.Linear(15, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)

    def unscale(self):
        for weight in self.model.parameters():
            weight.grad /= SCALE

    def clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)

    def reduce(self):
        for weight in self.model.parameters():
            if WORLD > 1:
                dist.all_reduce(weight.grad)
            weight.grad /= WORLD

    def step(self, x):
        self.optimizer.zero_grad()
        for micro_batch in x.chunk(MICRO_BATCHES):
            errors = self.model(micro_batch) - micro_batch[:, :2].sin()
            loss = errors.square().mean() / MICRO_BATCHES
            (SCALE * loss).backward()
            if BUG == "scale_is_taken_out_in_each_micro_batch":
                self.unscale()
        if BUG == "factor_is_taken_out_on_rank_0_only" and RANK == 0:
            self.unscale()
        self.reduce()
        if BUG == "clipped_before_scale_is_taken_out":
            self.clip()
            self.unscale()
        else:
            if not BUG:
                self.unscale()
            self.clip()
        self.optimizer.step()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(11)
    trainer = Trainer()
    with harness.training(trainer.model, trainer.optimizer):
        for step in range(2):
            x = torch.randn(16, 7, generator=torch.Generator().manual_seed(step))
            x[8:] *= 2
            trainer.step(x[RANK::WORLD])
    if WORLD > 1:
        dist.destroy_process_group()


main()
