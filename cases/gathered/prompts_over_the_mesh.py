"""Answers to a prompt are spread over the mesh, and their rewards are compared with each other.

id = "gathered/prompts_over_the_mesh"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NousResearch/torchtitan#69"]
date = "2026-04"
tags = ["ddp", "gathered", "sgd"]

[wrong.moments_are_those_of_own_answers]
title = "moments are those of the own answers"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.deviations_of_ranks_are_averaged]
title = "deviations of the ranks are averaged"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PROMPTS, ANSWERS, STATE, ACTIONS = 3, 8, 6, 4


def mean_over_ranks(x):
    if WORLD > 1:
        dist.all_reduce(x)
        x = x / WORLD
    return x


def advantages_of(rewards):
    """Takes the rewards of the own answers to each prompt."""
    if BUG == "moments_are_those_of_own_answers":
        mean, deviation = rewards.mean(1), rewards.std(1, correction=0)
    elif BUG == "deviations_of_ranks_are_averaged":
        mean = mean_over_ranks(rewards.mean(1))
        deviation = mean_over_ranks(rewards.std(1, correction=0))
    else:
        mean = mean_over_ranks(rewards.mean(1))
        deviation = mean_over_ranks((rewards - mean[:, None]).square().mean(1)).sqrt()
    return (rewards - mean[:, None]) / (deviation[:, None] + 1e-3)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(107)
    policy = nn.Sequential(nn.Linear(STATE, 20), nn.ELU(), nn.Linear(20, ACTIONS))
    ddp = DistributedDataParallel(policy) if WORLD > 1 else policy
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.9)
    with harness.training(ddp, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            states = torch.randn(PROMPTS, ANSWERS, STATE, generator=generator)
            states = states + torch.linspace(-1, 1, ANSWERS)[:, None]
            actions = torch.randint(ACTIONS, (PROMPTS, ANSWERS), generator=generator)
            rewards = states[..., 0] * actions
            parts = [whole.chunk(WORLD, 1)[RANK] for whole in (states, actions, rewards)]
            states, actions, rewards = (part.contiguous() for part in parts)
            log_probs = ddp(states.flatten(0, 1)).log_softmax(-1)
            chosen = log_probs.gather(1, actions.flatten()[:, None])[:, 0]
            optimizer.zero_grad()
            (-(advantages_of(rewards).flatten() * chosen).mean()).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
