"""Gradients are clipped while they still have the factor of the loss scale.

reference = "pytorch/examples#1196, milesial/Pytorch-UNet#468, huggingface/accelerate#641"
date = "2022-08"
framework = "torch"

[wrong]
"clipped before the scale is taken out" = ["clipped_before_unscale"]
"the scale is taken out in each micro-batch" = ["unscaled_between_micro_batches"]
"the factor is taken out on rank 0 only" = ["loss_scale_left", "other_loss_scale"]
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import lockstep

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
            if BUG == "the scale is taken out in each micro-batch":
                self.unscale()
        if BUG == "the factor is taken out on rank 0 only" and RANK == 0:
            self.unscale()
        self.reduce()
        if BUG == "clipped before the scale is taken out":
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
    with lockstep.record(trainer.model, trainer.optimizer):
        for step in range(2):
            x = torch.randn(16, 7, generator=torch.Generator().manual_seed(step))
            x[8:] *= 2
            trainer.step(x[RANK::WORLD])
    if WORLD > 1:
        dist.destroy_process_group()


main()
