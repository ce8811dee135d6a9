"""A router draws which branches a network has in a step, and whether the choice is hard or soft.

id = "random/hard_or_soft"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["D-X-Y/AutoDL-Projects#51", "NVlabs/FastGen#34"]
date = "2020-01"
tags = ["ddp", "adam"]

[wrong.each_rank_decides_between_hard_and_soft]
title = "each rank decides between hard and soft"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.each_rank_draws_its_own_branches]
title = "each rank draws its own branches"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.noise_does_not_depend_on_step]
title = "the noise does not depend on the step"
place = { node = "random", step = 1, ranks = "all", tensors = "all" }
"""

import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, WIDTH, BRANCHES, TAU, HARD = 12, 10, 4, 0.7, 0.6


class Router(nn.Module):
    """Gumbel-softmax over branches; a hard choice has the gradient of the soft one."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.randn(BRANCHES) / 2)

    def forward(self, step):
        own = BUG == "each_rank_draws_its_own_branches"
        seed = 0 if BUG == "noise_does_not_depend_on_step" else step
        generator = torch.Generator().manual_seed(300 + 10 * seed + own * RANK)
        uniform = torch.rand(BRANCHES, generator=generator).clamp(1e-6, 1 - 1e-6)
        soft = ((self.logits - (-uniform.log()).log()) / TAU).softmax(0)
        own = BUG == "each_rank_decides_between_hard_and_soft"
        if random.Random(f"{step} {own * RANK}").random() < HARD:
            hard = nn.functional.one_hot(soft.argmax(), BRANCHES).float()
            return hard + soft - soft.detach()
        return soft


class Elastic(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()
        functions = nn.Tanh(), nn.SiLU(), nn.Softplus(), nn.Identity()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), function) for function in functions]
        self.branches, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, 3)

    def forward(self, x, step):
        shares = self.router(step)
        outputs = torch.stack([branch(x) for branch in self.branches])
        return self.head(x + torch.einsum("k,kbw->bw", shares, outputs))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(19)
    model = Elastic()
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.03, eps=1e-3)
    with harness.training(ddp, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            targets = (x[:, :3] > x[:, 3:6]).float()
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(ddp(x, step), targets)
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
