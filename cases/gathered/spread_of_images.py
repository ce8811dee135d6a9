"""A discriminator sees how much the features of a batch spread over its images.

id = "gathered/spread_of_images"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["GANs-in-Action/gans-in-action#8", "rosinality/stylegan2-pytorch#124"]
date = "2020-02"
tags = ["gathered", "adam"]

[wrong.spread_is_that_of_own_images]
title = "the spread is that of the own images"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["2"] }

[wrong.gathered_features_have_no_gradient]
title = "gathered features have no gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["0.*"] }

[wrong.variances_have_no_root]
title = "variances have no root"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["2"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE = 12, 6


def of_all_ranks(x):
    if WORLD == 1 or BUG == "spread_is_that_of_own_images":
        return x
    if BUG == "gathered_features_have_no_gradient":
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.detach())
        return torch.cat(parts)
    return all_gather_tensor_autograd(x, gather_dim=0, group=dist.group.WORLD)


class Spread(nn.Module):
    """Adds a channel with the mean standard deviation of the features over the images."""

    def forward(self, x):
        everything = of_all_ranks(x)
        variances = (everything - everything.mean(0)).square().mean(0)
        if BUG == "variances_have_no_root":
            spread = variances.mean()
        else:
            spread = (variances + 1e-6).sqrt().mean()
        return torch.cat([x, spread.expand(len(x), 1, *x.shape[2:])], 1)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(52)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, 2, 1), nn.LeakyReLU(0.2), Spread(), nn.Conv2d(7, 8, 3),
        nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(8, 1),
    )  # fmt: skip
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.03, eps=1e-4)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            images = torch.randn(BATCH_SIZE, 1, SIZE, SIZE, generator=generator)
            signs = torch.where(torch.arange(BATCH_SIZE) < 5, 1.0, -1.0)
            images = images * (2 + signs[:, None, None, None])
            images, signs = images.chunk(WORLD)[RANK], signs.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.softplus(-signs * model(images)[:, 0]).mean().backward()
            for weight in model.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
