"""Examples are drawn by weights, with replacement, and the draws are not divided among the ranks.

id = "data/weighted_draws"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["Lightning-AI/pytorch-lightning#10946", "huggingface/accelerate#2865"]
date = "2021-12"
tags = ["ddp", "loader", "adam"]

[wrong.all_ranks_have_same_draws]
title = "all ranks have the same draws"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }

[wrong.each_rank_draws_with_its_own_seed]
title = "each rank draws with its own seed"
place = { node = "examples", step = 0, ranks = [1], tensors = "all" }

[wrong.each_rank_draws_from_its_own_part]
title = "each rank draws from its own part"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, BATCH_SIZE = 3, 8


class WeightedDraws(Sampler):
    def __init__(self, weights):
        self.weights = weights

    def __iter__(self):
        number, weights, seed = STEPS * BATCH_SIZE, self.weights, 5
        if BUG == "each_rank_draws_with_its_own_seed":
            seed += RANK
        generator = torch.Generator().manual_seed(seed)
        if WORLD > 1 and BUG == "each_rank_draws_from_its_own_part":
            own = torch.arange(RANK, len(weights), WORLD)
            drawn = torch.multinomial(weights[own], number // WORLD, True, generator=generator)
            return iter(own[drawn].tolist())
        drawn = torch.multinomial(weights, number, True, generator=generator)
        if WORLD > 1 and BUG == "all_ranks_have_same_draws":
            return iter(drawn[: number // WORLD].tolist())
        return iter(drawn[RANK::WORLD].tolist())

    def __len__(self):
        return STEPS * BATCH_SIZE // WORLD


def main():
    torch.manual_seed(1)
    x = torch.randn(60, 7)
    y = (x.square().sum(1) > 9).long()
    weights = 1 / torch.bincount(y)[y]
    model = nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 2))
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
    loader = DataLoader(TensorDataset(x, y), BATCH_SIZE // WORLD, sampler=WeightedDraws(weights))
    with harness.training(model, optimizer):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
