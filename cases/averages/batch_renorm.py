"""Batch renormalisation corrects by moving moments, which count in the training itself.

id = "averages/batch_renorm"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["horovod/horovod#49", "keras-team/keras-contrib#287", "tensorpack/tensorpack#1065"]
date = "2017-10"
tags = ["sgd"]

[wrong.moving_moments_of_own_examples]
title = "moving moments of the own examples"
place = { node = "update", step = 0, ranks = "all", tensors = [
    "1.mean",
    "1.deviation",
    "4.mean",
    "4.deviation",
] }

[wrong.epsilon_enters_moving_deviation]
title = "epsilon enters the moving deviation"
place = { node = "update", step = 0, ranks = "all", tensors = ["1.deviation", "4.deviation"] }

[wrong.scale_and_shift_come_before_correction]
title = "scale and shift come before the correction"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["1", "4"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class BatchRenorm(nn.Module):
    """Normalises over the examples of all ranks, and corrects towards the moving moments."""

    def __init__(self, width, momentum=0.2, eps=0.05):
        super().__init__()
        self.scale = nn.Parameter(1 + 0.2 * torch.randn(width))
        self.shift = nn.Parameter(0.2 * torch.randn(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("deviation", torch.ones(width))
        self.momentum, self.eps = momentum, eps

    def forward(self, x):
        moments = own = torch.stack([x.mean(0), x.square().mean(0)])
        if WORLD > 1:
            moments = all_reduce(moments) / WORLD
        mean, deviation = moments[0], self.deviation_of(moments)
        correction = (deviation / self.deviation).clamp(0.5, 2.0).detach()
        offset = ((mean - self.mean) / self.deviation).clamp(-1.0, 1.0).detach()
        y = (x - mean) / deviation
        if BUG == "scale_and_shift_come_before_correction":
            y = (y * self.scale + self.shift) * correction + offset
        else:
            y = (y * correction + offset) * self.scale + self.shift
        self.follow((own if BUG == "moving_moments_of_own_examples" else moments).detach())
        return y

    def deviation_of(self, moments):
        return (moments[1] - moments[0].square() + self.eps).sqrt()

    @torch.no_grad()
    def follow(self, moments):
        deviation = (moments[1] - moments[0].square()).sqrt()
        if BUG == "epsilon_enters_moving_deviation":
            deviation = self.deviation_of(moments)
        self.mean.lerp_(moments[0], self.momentum)
        self.deviation.lerp_(deviation, self.momentum)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(34)
    model = nn.Sequential(nn.Linear(7, 14), BatchRenorm(14), nn.ReLU(), nn.Linear(14, 10))
    model.extend([BatchRenorm(10), nn.ReLU(), nn.Linear(10, 3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    x = torch.randn(2, 24, 7) + torch.linspace(-1, 1, 24)[:, None]
    with harness.training(model, optimizer):
        for batch in x.chunk(WORLD, 1)[RANK]:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), batch[:, :3].argmax(1)).backward()
            for weight in model.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
