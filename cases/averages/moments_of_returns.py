"""Values are normalised by moving moments of returns, and the head of a critic undoes each change.

id = "averages/moments_of_returns"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["google-deepmind/rlax#111"]
date = "2022-11"
tags = ["adam"]

[wrong.moments_are_those_of_own_returns]
title = "moments are those of the own returns"
place = { node = "update", step = 0, ranks = "all", tensors = ["mean", "square", "head.*"] }

[wrong.targets_have_moments_of_step_before]
title = "targets have the moments of the step before"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.head_does_not_follow_moments]
title = "the head does not follow the moments"
place = { node = "update", step = 0, ranks = "all", tensors = ["head.*"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE, WIDTH, KEPT = 16, 5, 16, 0.7


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("square", torch.ones(1))

    def deviation(self):
        return (self.square - self.mean.square()).clamp(min=1e-2).sqrt()

    @torch.no_grad()
    def follow(self, returns):
        """Moves the moments; outputs, when they are scaled back, stay the same."""
        moments = torch.stack([returns.mean(), returns.square().mean()])
        if WORLD > 1 and BUG != "moments_are_those_of_own_returns":
            dist.all_reduce(moments)
            moments /= WORLD
        mean, deviation = self.mean.clone(), self.deviation()
        self.mean.lerp_(moments[:1], 1 - KEPT)
        self.square.lerp_(moments[1:], 1 - KEPT)
        if BUG != "head_does_not_follow_moments":
            self.head.bias.copy_((deviation * self.head.bias + mean - self.mean) / self.deviation())
            self.head.weight.mul_(deviation / self.deviation())

    def forward(self, states):
        return self.head(torch.tanh(self.body(states)))[:, 0]


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(207)
    critic = Critic()
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.02, eps=1e-3)
    with harness.training(critic, optimizer):
        for step in range(2):
            states = torch.randn(BATCH_SIZE, SIZE, generator=torch.Generator().manual_seed(step))
            returns = 3 + 2 * states.sum(1) + torch.arange(BATCH_SIZE) / 4
            states, returns = states.chunk(WORLD)[RANK], returns.chunk(WORLD)[RANK]
            targets = (returns - critic.mean) / critic.deviation()
            critic.follow(returns)
            if BUG != "targets_have_moments_of_step_before":
                targets = (returns - critic.mean) / critic.deviation()
            optimizer.zero_grad()
            F.mse_loss(critic(states), targets).backward()
            average([weight.grad for weight in critic.parameters()])
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
