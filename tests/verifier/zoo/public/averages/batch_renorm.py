"""Batch renormalisation corrects by moving moments, which count in the training itself.

reference = "horovod/horovod#49, keras-team/keras-contrib#287, tensorpack/tensorpack#1065"
date = "2017-10"
framework = "torch"

[wrong]
"moving moments of the own examples" = ["diverged_replicas", "statistics_not_averaged"]
"epsilon enters the moving deviation" = ["other_statistics"]
"scale and shift come before the correction" = ["other_outputs"]
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce

import lockstep

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
        if BUG == "scale and shift come before the correction":
            y = (y * self.scale + self.shift) * correction + offset
        else:
            y = (y * correction + offset) * self.scale + self.shift
        self.follow((own if BUG == "moving moments of the own examples" else moments).detach())
        return y

    def deviation_of(self, moments):
        return (moments[1] - moments[0].square() + self.eps).sqrt()

    @torch.no_grad()
    def follow(self, moments):
        deviation = (moments[1] - moments[0].square()).sqrt()
        if BUG == "epsilon enters the moving deviation":
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
    with lockstep.record(model, optimizer):
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
