"""Pictures are disturbed, by as much as the signs of a discriminator say that it learns by heart.

id = "averages/rate_of_disturbance"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["Zhendong-Wang/Diffusion-GAN#2"]
date = "2022-07"
tags = ["gan", "adam"]

[right.rate_moves_before_update]
title = "the rate moves before the update"
patch = [
    ["average([weight.grad", "model.adapt(logits.data); average([weight.grad"],
    ["            model.adapt(logits.detach())", ""],
]

[wrong.rate_follows_own_pictures]
title = "the rate follows the own pictures"
place = { node = "update", step = 0, ranks = "all", tensors = ["rate"] }

[wrong.signs_are_added_over_ranks]
title = "signs are added over ranks"
place = { node = "update", step = 0, ranks = "all", tensors = ["rate"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE, TARGET, SPEED = 20, 8, 0.4, 0.5


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(SIZE, 24), nn.Linear(24, 1)
        self.register_buffer("rate", torch.full((1,), 0.3))

    def forward(self, pictures):
        return self.leave(F.leaky_relu(self.enter(pictures), 0.2))[:, 0]

    @torch.no_grad()
    def adapt(self, logits):
        sign = logits.sign().mean()
        if WORLD > 1 and BUG != "rate_follows_own_pictures":
            dist.all_reduce(sign)
            if BUG != "signs_are_added_over_ranks":
                sign /= WORLD
        self.rate.add_(SPEED * (sign - TARGET)).clamp_(0, 3)


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(210)
    model = Discriminator()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9), eps=1e-3)
    with harness.training(model, optimizer):
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            draws = torch.randn(3, BATCH_SIZE, SIZE, generator=generator).chunk(WORLD, 1)[RANK]
            real, fake, noise = draws[0].abs() - 0.5, draws[1], draws[2]
            optimizer.zero_grad()
            logits = model(real + model.rate.clone() * noise)
            others = model(fake + model.rate.clone() * noise.flip(1))
            (F.softplus(-logits).mean() + F.softplus(others).mean()).backward()
            average([weight.grad for weight in model.parameters()])
            optimizer.step()
            model.adapt(logits.detach())
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
