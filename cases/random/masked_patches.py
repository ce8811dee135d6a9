"""A masked autoencoder hides patches of each image, which the model draws at random.

id = "random/masked_patches"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "pengzhiliang/MAE-pytorch#28",
    "ecmwf/WeatherGenerator#277",
    "facebookresearch/fastMRI#123",
]
date = "2021-02"
tags = ["ddp", "gathered", "sgd"]

[wrong.ranks_hide_same_patches]
title = "ranks hide the same patches"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.same_patches_are_hidden_in_each_step]
title = "the same patches are hidden in each step"
place = { node = "random", step = 1, ranks = "all", tensors = "all" }

[wrong.patches_are_not_put_back_in_order]
title = "patches are not put back in order"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["decoder"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, PATCHES, SIZE, WIDTH, KEPT = 8, 9, 6, 16, 4


class Block(nn.Module):
    """Attention of one head, and a layer with a residual."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix, self.leave = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        return x + self.leave(torch.softmax(query @ key.mT / WIDTH**0.5, -1) @ value)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, SIZE)
        self.places = nn.Parameter(torch.randn(PATCHES, WIDTH) / 4)
        self.hidden = nn.Parameter(torch.randn(WIDTH) / 4)
        self.encoder, self.decoder = Block(), Block()
        self.generator = torch.Generator().manual_seed(900)

    def draw(self):
        """Returns an order of the patches of each own image: those that are kept, then others."""
        if BUG == "same_patches_are_hidden_in_each_step":
            self.generator.manual_seed(900)
        noise = torch.rand(BATCH_SIZE, PATCHES, generator=self.generator)
        return noise.chunk(WORLD)[0 if BUG == "ranks_hide_same_patches" else RANK].argsort(1)

    def forward(self, patches):
        order = self.draw()[..., None]
        x = self.enter(patches) + self.places
        kept = self.encoder(x.gather(1, order[:, :KEPT].expand(-1, -1, WIDTH)))
        filler = self.hidden.expand(len(x), PATCHES - KEPT, WIDTH)
        x = torch.cat([kept, filler], 1)
        if BUG != "patches_are_not_put_back_in_order":
            x = x.gather(1, order.argsort(1).expand(-1, -1, WIDTH))
        is_hidden = order.argsort(1)[..., 0] >= KEPT
        return self.leave(self.decoder(x + self.places)), is_hidden


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(17)
    model = Autoencoder()
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with harness.training(ddp, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            patches = torch.randn(BATCH_SIZE, PATCHES, SIZE, generator=generator).cumsum(1) / 2
            patches = patches.chunk(WORLD)[RANK]
            outputs, is_hidden = ddp(patches)
            errors = (outputs - patches).square().mean(2)
            optimizer.zero_grad()
            errors[is_hidden].mean().backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
