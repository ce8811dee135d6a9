"""The weight of a policy's entropy follows the mean entropy of all tokens towards a target.

id = "averages/entropy_target"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["huggingface/trl#6140"]
date = "2026-06"
tags = ["recurrent", "gathered", "adam"]

[wrong.entropy_is_mean_of_ranks_means]
title = "the entropy is a mean of the ranks' means"
place = { node = "update", step = 0, ranks = "all", tensors = ["coefficient.value"] }

[wrong.each_rank_looks_at_its_own_entropy]
title = "each rank looks at its own entropy"
place = { node = "update", step = 0, ranks = "all", tensors = ["coefficient.value"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, LENGTH, STATE, ACTIONS, TARGET, RATE = 8, 9, 5, 6, 1.2, 3.0


def sum_over_ranks(x):
    if WORLD > 1:
        dist.all_reduce(x)
    return x


class Coefficient(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("value", torch.tensor(0.5))

    @torch.no_grad()
    def update(self, entropies, mask):
        total, number = (entropies * mask).sum(), mask.sum()
        if BUG == "entropy_is_mean_of_ranks_means":
            mean = sum_over_ranks(total / number) / WORLD
        elif BUG == "each_rank_looks_at_its_own_entropy":
            mean = total / number
        else:
            mean = sum_over_ranks(total) / sum_over_ranks(number)
        self.value.mul_(torch.exp(RATE * (TARGET - mean)))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(STATE, 12, batch_first=True), nn.Linear(12, ACTIONS)

    def forward(self, states):
        return self.head(4 * self.cell(states)[0])


def get_batch(step):
    """Returns states, actions, advantages and a mask; the first half of the answers is long."""
    generator = torch.Generator().manual_seed(step)
    states = torch.randn(BATCH_SIZE, LENGTH, STATE, generator=generator)
    states[: BATCH_SIZE // 2] *= 3  # Long answers are the surer ones.
    actions = torch.randint(ACTIONS, (BATCH_SIZE, LENGTH), generator=generator)
    advantages = torch.randn(BATCH_SIZE, 1, generator=generator)
    lengths = torch.tensor([9, 8, 9, 7, 2, 1, 3, 2])
    mask = (torch.arange(LENGTH) < lengths[:, None]).float()
    return [part.chunk(WORLD)[RANK] for part in (states, actions, advantages, mask)]


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(43)
    policy, coefficient = Policy(), Coefficient()
    optimizer = torch.optim.NAdam(policy.parameters(), lr=0.05, eps=1e-4)
    with harness.training(policy, optimizer, others={"coefficient": coefficient}):
        for step in range(3):
            states, actions, advantages, mask = get_batch(step)
            logs = policy(states).log_softmax(-1)
            chosen = logs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
            entropies = -(logs.exp() * logs).sum(-1)
            gains = advantages * chosen + coefficient.value.clone() * entropies
            number = sum_over_ranks(mask.sum())
            optimizer.zero_grad()
            (-(gains * mask).sum() / number).backward()
            for weight in policy.parameters():
                sum_over_ranks(weight.grad)
            optimizer.step()
            coefficient.update(entropies, mask)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
