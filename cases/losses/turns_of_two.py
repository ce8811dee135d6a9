"""A discriminator and a generator are two models, each in DDP, that take turns in each step.

id = "losses/turns_of_two"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["jik876/hifi-gan#56", "meta-pytorch/torchforge#71"]
date = "2021-02"
tags = ["ddp", "adam"]

[right.by_names]
title = "the models have names"
reference = "patched"
patch = [["models = [critic, maker]", "models = nn.ModuleDict({'critic': critic, 'maker': maker})"]]

[wrong.loss_of_maker_is_divided_by_ranks]
title = "the generator's loss is divided by the number of ranks"
place = { node = "loss", step = 0, ranks = "all", tensors = ["1.*"] }

[wrong.critic_keeps_gradients_of_maker]
title = "the discriminator keeps the gradients of the generator's turn"
place = { node = "gradient", step = 1, ranks = "all", tensors = ["0.*"] }

[wrong.maker_keeps_its_gradients]
title = "the generator keeps its gradients"
place = { node = "gradient", step = 1, ranks = "all", tensors = ["1.*"] }
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
BATCH_SIZE, NOISE, WIDTH = 12, 4, 6


def main():
    torch.manual_seed(62)
    critic = nn.Sequential(nn.Linear(WIDTH, 14), nn.SiLU(), nn.Linear(14, 1))
    maker = nn.Sequential(nn.Linear(NOISE, 14), nn.ELU(), nn.Linear(14, WIDTH))
    if WORLD > 1:
        dist.init_process_group("gloo")
        critic, maker = DistributedDataParallel(critic), DistributedDataParallel(maker)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (critic, maker)]
    models = [critic, maker]
    with harness.training(models, optimizers):
        for step in range(2):
            seeded = torch.Generator().manual_seed(step)
            noise = torch.randn(BATCH_SIZE, NOISE, generator=seeded)[RANK::WORLD]
            x = torch.randn(BATCH_SIZE, WIDTH, generator=seeded).cumsum(1)[RANK::WORLD]
            if BUG != "critic_keeps_gradients_of_maker":
                optimizers[0].zero_grad()
            F.softplus(-critic(x)).mean().backward()
            made = maker(noise)
            F.softplus(critic(made.detach())).mean().backward()
            optimizers[0].step()
            if BUG != "maker_keeps_its_gradients":
                optimizers[1].zero_grad()
            loss = F.softplus(-critic(made)).mean()
            if BUG == "loss_of_maker_is_divided_by_ranks":
                loss = loss / WORLD
            loss.backward()
            optimizers[1].step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
