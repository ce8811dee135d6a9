"""Running moments of observations: each rank normalises by its own, or merges them wrongly.

id = "averages/observation_normaliser"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["leggedrobotics/rsl_rl#226", "Denys88/rl_games#363", "openai/baselines#695"]
date = "2026-08"
tags = ["ddp"]

[wrong.moments_of_own_observations]
title = "moments of the own observations"
place = { node = "update", step = 0, ranks = "all", tensors = ["0.count", "0.mean", "0.var"] }

[wrong.variances_without_spread_of_means]
title = "variances without the spread of the means"
place = { node = "update", step = 0, ranks = "all", tensors = ["0.var"] }

[wrong.all_totals_are_added_again]
title = "all totals are added again"
place = { node = "update", step = 0, ranks = "all", tensors = ["0.count", "0.mean", "0.var"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
OBSERVATIONS, ACTIONS = 6, 2


class Normaliser(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(4.0))
        self.register_buffer("mean", torch.zeros(OBSERVATIONS))
        self.register_buffer("var", torch.ones(OBSERVATIONS))

    def forward(self, x):
        return (x - self.mean) / (self.var + 1e-5).sqrt()

    @torch.no_grad()
    def update(self, x):
        count, mean, var = torch.tensor(float(len(x))), x.mean(0), x.var(0, unbiased=False)
        if BUG == "all_totals_are_added_again":
            count, mean, var = self.merged(count, mean, var)
            self.count, self.mean, self.var = self.of_all(count, mean, var)
            return
        if BUG != "moments_of_own_observations":
            count, mean, var = self.of_all(count, mean, var)
        self.count, self.mean, self.var = self.merged(count, mean, var)

    def merged(self, count, mean, var):
        total, delta = self.count + count, mean - self.mean
        spread = delta**2 * self.count * count / total
        new = (self.var * self.count + var * count + spread) / total
        return total, self.mean + delta * count / total, new

    def of_all(self, count, mean, var):
        if WORLD == 1:
            return count, mean, var
        sums = torch.stack([mean, var, var + mean**2]) * count
        for value in (sums, count):
            dist.all_reduce(value)
        mean, within, square = sums / count
        has_spread = BUG != "variances_without_spread_of_means"
        return count, mean, square - mean**2 if has_spread else within


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(4)
    normaliser = Normaliser()
    net = nn.Sequential(normaliser, nn.Linear(OBSERVATIONS, 16), nn.Tanh(), nn.Linear(16, ACTIONS))
    model = DistributedDataParallel(net, forward_sync_buffers=False) if WORLD > 1 else net
    optimizer = torch.optim.RMSprop(net.parameters(), lr=2e-3)
    with harness.training(model, optimizer):
        for _ in range(2):
            # The environments of a rank are alike.
            x = 3 * torch.randn(32, OBSERVATIONS) + torch.linspace(-4, 4, 32)[:, None]
            action, advantage = torch.randint(ACTIONS, (32,)), torch.randn(32)
            x, action, advantage = (part.chunk(WORLD)[RANK] for part in (x, action, advantage))
            log_prob = -F.cross_entropy(model(x), action, reduction="none")
            optimizer.zero_grad()
            (-advantage * log_prob).mean().backward()
            optimizer.step()
            normaliser.update(x)
    if WORLD > 1:
        dist.destroy_process_group()


main()
