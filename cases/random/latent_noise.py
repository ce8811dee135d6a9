"""A variational autoencoder draws a latent vector for each example in each step.

id = "random/latent_noise"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras-io#790", "keras-team/keras-io#789"]
date = "2022-01"
tags = ["fsdp2", "adam"]

[wrong.noise_is_that_of_first_step]
title = "the noise is that of the first step"
place = { node = "random", step = 1, ranks = "all", tensors = "all" }

[wrong.ranks_draw_same_noise]
title = "ranks draw the same noise"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.noise_is_drawn_once_for_all_examples]
title = "the noise is drawn once for all examples"
place = { node = "random", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE, HIDDEN, LATENT = 12, 10, 14, 4


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIZE, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 8))
        self.decoder = nn.Sequential(nn.Linear(LATENT, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, SIZE))
        self.generator = torch.Generator().manual_seed(77)

    def draw(self, number):
        """Returns noise for the own part of the batch."""
        if BUG == "noise_is_that_of_first_step":
            self.generator.manual_seed(77)
        noise = torch.randn(BATCH_SIZE, LATENT, generator=self.generator)
        if BUG == "noise_is_drawn_once_for_all_examples":
            return noise[:1].expand(number, -1)
        return noise.chunk(WORLD)[0 if BUG == "ranks_draw_same_noise" else RANK]

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        latent = mean + (log_variance / 2).exp() * self.draw(len(x))
        return self.decoder(latent), mean, log_variance


def main():
    torch.manual_seed(9)
    model = Autoencoder()
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,))
        for part in (model.encoder, model.decoder, model):
            fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.rand(BATCH_SIZE, SIZE, generator=generator).round().chunk(WORLD)[RANK]
            outputs, mean, log_variance = model(x)
            errors = F.binary_cross_entropy_with_logits(outputs, x, reduction="none").sum(1)
            divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum(1) / 2
            (errors + divergence).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
