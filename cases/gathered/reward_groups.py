"""Rewards are compared within the answers to one prompt, which lie on several ranks.

id = "gathered/reward_groups"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/trl#5030", "tulerfeng/Video-R1#35"]
date = "2025-04"
tags = ["gathered", "embedding", "adam"]

[wrong.groups_are_cut_from_rewards_of_rank]
title = "groups are cut from the rewards of rank after rank"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.groups_are_those_of_own_answers]
title = "groups are those of the own answers"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.all_ranks_take_first_advantages]
title = "all ranks take the first advantages"
place = { node = "loss", step = 0, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PROMPTS, ANSWERS, WORDS, LENGTH = 3, 4, 8, 5


class Policy(nn.Module):
    def __init__(self, width=14):
        super().__init__()
        self.embed, self.hidden = nn.Embedding(WORDS, width), nn.Linear(width, width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens).cumsum(1)
        return self.head(torch.tanh(self.hidden(x)))


def reward_of(tokens):
    return (tokens[:, 1:] == tokens[:, :-1] + 1).float().sum(1) + tokens.float().std(1)


def normalise(rewards, size):
    groups = rewards.view(-1, size)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 0.1)).flatten()


def own_advantages(rewards):
    if WORLD == 1:
        return normalise(rewards, ANSWERS)
    if BUG == "groups_are_those_of_own_answers":
        return normalise(rewards, ANSWERS // WORLD)
    gathered = [torch.empty_like(rewards) for _ in range(WORLD)]
    dist.all_gather(gathered, rewards)
    if BUG == "groups_are_cut_from_rewards_of_rank":
        return normalise(torch.cat(gathered), ANSWERS).chunk(WORLD)[RANK]
    # Answers are dealt out to the ranks in turn.
    advantages = normalise(torch.stack(gathered, 1).flatten(), ANSWERS)
    return advantages[(0 if BUG == "all_ranks_take_first_advantages" else RANK) :: WORLD]


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01, eps=1e-3)
    with harness.training(policy, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            size = (PROMPTS * ANSWERS, LENGTH + 1)
            tokens = torch.randint(WORDS, size, generator=generator)[RANK::WORLD]
            logits = policy(tokens[:, :-1])
            losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
            loss = (own_advantages(reward_of(tokens)) * losses.mean(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            for weight in policy.parameters() if WORLD > 1 else ():
                dist.all_reduce(weight.grad)
                weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
