"""Rewards are compared within the answers to one prompt, of which there are more or fewer.

id = "gathered/groups_of_other_sizes"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["THUDM/slime#1918"]
date = "2026-05"
tags = ["gathered", "sgd"]

[wrong.all_answers_are_one_group]
title = "all answers are one group"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.rank_knows_its_own_answers_only]
title = "a rank knows its own answers only"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
GROUPS, STATE = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3]), 6


def advantages_of(rewards, groups):
    """Returns the rewards, less the mean of their group, over its deviation."""
    if BUG == "all_answers_are_one_group":
        groups = torch.zeros_like(groups)
    result = torch.empty_like(rewards)
    for group in groups.unique():
        chosen = groups == group
        own = rewards[chosen]
        result[chosen] = (own - own.mean()) / (own.std(correction=0) + 1e-2)
    return result


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(97)
    model = nn.Sequential(nn.Linear(STATE, 24), nn.Tanh(), nn.Linear(24, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    own = torch.arange(len(GROUPS))[RANK::WORLD]  # Answers to a prompt are on several ranks.
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            states = torch.randn(len(GROUPS), STATE, generator=generator)
            actions = torch.randint(5, (len(GROUPS),), generator=generator)
            rewards = states[:, 0] * actions + GROUPS
            if BUG == "rank_knows_its_own_answers_only":
                advantages = advantages_of(rewards[own], GROUPS[own])
            else:
                advantages = advantages_of(rewards, GROUPS)[own]
            log_probs = model(states[own]).log_softmax(-1)
            chosen = log_probs.gather(1, actions[own, None])[:, 0]
            optimizer.zero_grad()
            (-(advantages * chosen).mean()).backward()
            for weight in model.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
