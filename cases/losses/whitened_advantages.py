"""Advantages of all tokens are centred and scaled by moments over all ranks.

id = "losses/whitened_advantages"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["THUDM/slime#1369"]
date = "2026-01"
tags = ["recurrent", "embedding", "sgd"]

[wrong.mean_is_added_again]
title = "the mean is added again"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.moments_of_own_tokens]
title = "moments of the own tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.variances_of_ranks_are_averaged]
title = "variances of the ranks are averaged"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ACTIONS, LENGTH, BATCH_SIZE = 6, 7, 8


class Policy(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.embed = nn.Embedding(ACTIONS, width)
        self.cell = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, ACTIONS)

    def forward(self, tokens):
        return self.head(self.cell(self.embed(tokens))[0])


def total(*values):
    values = torch.stack(values)
    if WORLD > 1 and BUG != "moments_of_own_tokens":
        dist.all_reduce(values)
    return values.unbind()


def whiten(values, mask):
    """Returns the values with mean 0 and variance 1 over the unmasked tokens of all ranks."""
    own_sum, own_count = (values * mask).sum(), mask.sum()
    whole_sum, count = total(own_sum, own_count)
    mean = whole_sum / count
    if BUG == "variances_of_ranks_are_averaged":
        squares = ((values - own_sum / own_count).square() * mask).sum() / own_count
        variance = total(squares)[0] / WORLD
    else:
        variance = total(((values - mean).square() * mask).sum())[0] / count
    whitened = (values - mean) * torch.rsqrt(variance + 1e-6)
    return whitened + mean if BUG == "mean_is_added_again" else whitened


def get_batch(step):
    generator = torch.Generator().manual_seed(40 + step)
    tokens = torch.randint(ACTIONS, (BATCH_SIZE, LENGTH + 1), generator=generator)
    mask = (torch.arange(LENGTH) < torch.tensor([7, 2, 6, 3, 7, 3, 5, 1])[:, None]).float()
    rewards = torch.randn(BATCH_SIZE, LENGTH, generator=generator) + 2
    rewards[::2] *= 3
    rewards[1::2] += 4
    return tokens, mask, rewards


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.3, momentum=0.9)
    with harness.training(policy, optimizer):
        for step in range(2):
            whole = get_batch(step)
            tokens, mask, rewards = (part[RANK::WORLD] for part in whole)
            logits = policy(tokens[:, :-1])
            losses = F.cross_entropy(
                logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
            )
            advantages = whiten(rewards, mask) * mask
            loss = (losses * advantages.flatten()).sum() / whole[1].sum()
            optimizer.zero_grad()
            loss.backward()
            if WORLD > 1:
                for weight in policy.parameters():
                    dist.all_reduce(weight.grad)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
