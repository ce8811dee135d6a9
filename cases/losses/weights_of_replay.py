"""Replayed transitions are weighted against how often they are drawn, the largest weight being 1.

id = "losses/weights_of_replay"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "openai/baselines#1131",
    "google-research/seed_rl#3",
    "takoika/PrioritizedExperienceReplay#2",
]
date = "2018-04"
tags = ["sgd"]

[right.sums_are_divided_by_batch]
title = "sums are divided by the batch, times the ranks"
patch = [
    [
        "(weights_of(chances) * losses).mean().backward()",
        "((weights_of(chances) * losses).sum() * WORLD / BATCH_SIZE).backward()",
    ],
]

[wrong.largest_weight_is_that_of_rank]
title = "the largest weight is that of a rank"
place = { node = "loss", step = 0, ranks = [0], tensors = "all" }

[wrong.weights_are_divided_by_smallest]
title = "weights are divided by the smallest"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.losses_are_divided_by_sum_of_own_weights]
title = "losses are divided by the sum of the own weights"
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
BATCH_SIZE, SIZE, ACTIONS, BETA, STORED = 16, 6, 4, 0.6, 200


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


def weights_of(chances):
    """Returns the importance of transitions; `chances` is how likely each was to be drawn."""
    weights = (STORED * chances) ** -BETA
    if BUG == "losses_are_divided_by_sum_of_own_weights":
        return weights / weights.mean()
    most = weights.min() if BUG == "weights_are_divided_by_smallest" else weights.max()
    if WORLD > 1 and BUG != "largest_weight_is_that_of_rank":
        is_smallest = BUG == "weights_are_divided_by_smallest"
        dist.all_reduce(most, dist.ReduceOp.MIN if is_smallest else dist.ReduceOp.MAX)
    return weights / most


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(211)
    network = nn.Sequential(nn.Linear(SIZE, 20), nn.ReLU(), nn.Linear(20, ACTIONS))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
    with harness.training(network, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            states = torch.randn(BATCH_SIZE, SIZE, generator=generator)
            chances = torch.rand(BATCH_SIZE, generator=generator)
            chances *= torch.linspace(0.2, 2, BATCH_SIZE)
            states, chances = (part.chunk(WORLD)[RANK] for part in (states, chances / STORED))
            actions, returns = states[:, :ACTIONS].argmax(1), states.sum(1).cos()
            values = network(states).gather(1, actions[:, None])[:, 0]
            losses = F.smooth_l1_loss(values, returns, reduction="none")
            optimizer.zero_grad()
            (weights_of(chances) * losses).mean().backward()
            average([weight.grad for weight in network.parameters()])
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
