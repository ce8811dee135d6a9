"""A critic is penalised by the norms of its gradients, which have to be differentiated again.

id = "losses/gradient_penalty"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["ooples/AiDotNet#1844", "mlpack/mlpack#3063"]
date = "2021-09"
tags = []

[wrong.penalty_has_no_graph]
title = "the penalty has no graph"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["layers.*", "score.weight"] }

[wrong.norm_is_taken_over_all_examples_of_rank]
title = "the norm is taken over all examples of a rank"
place = { node = "loss", step = 0, ranks = "all", tensors = ["layers.*", "score.weight"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CONFIG = {"batch": 12, "width": 16, "penalty": 10.0, "lr": 0.02, "steps": 2}


class Critic(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, width), nn.Softplus(), nn.Linear(width, width), nn.Tanh()
        )
        self.score = nn.Linear(width, 1)

    def forward(self, x):
        return self.score(self.layers(x)).squeeze(1)


def gradient_penalty(critic, real, false, share):
    mixed = (share * real + (1 - share) * false).requires_grad_()
    has_graph = BUG != "penalty_has_no_graph"
    (slopes,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=has_graph)
    if BUG == "norm_is_taken_over_all_examples_of_rank":
        return (slopes.norm() - 1) ** 2
    return ((slopes.norm(dim=1) - 1) ** 2).mean()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    critic = Critic(CONFIG["width"])
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=CONFIG["lr"], eps=1e-3)
    data = torch.Generator().manual_seed(3)
    with harness.training(critic, optimizer):
        for _ in range(CONFIG["steps"]):
            real = 1 + torch.randn(CONFIG["batch"], 4, generator=data)
            false = 2 * torch.randn(CONFIG["batch"], 4, generator=data)
            share = torch.rand(CONFIG["batch"], 1, generator=data)
            real, false, share = (part[RANK::WORLD] for part in (real, false, share))
            scores = critic(torch.cat([real, false]))
            loss = scores[len(real) :].mean() - scores[: len(real)].mean()
            loss = loss + CONFIG["penalty"] * gradient_penalty(critic, real, false, share)
            optimizer.zero_grad()
            loss.backward()
            for weight in critic.parameters() if WORLD > 1 else ():
                dist.all_reduce(weight.grad)
                weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
