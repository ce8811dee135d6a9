"""A generator is penalised where path lengths differ from their moving mean over all images.

id = "averages/path_lengths"
framework = "torch"
processes = 2
steps = 4
mode = "pair"
references = ["rosinality/stylegan2-pytorch#159", "rosinality/stylegan2-pytorch#48"]
date = "2020-02"
tags = ["adam"]

[wrong.mean_is_that_of_own_lengths]
title = "the mean is that of the own lengths"
place = { node = "loss", step = 1, ranks = "all", tensors = "all" }

[wrong.gradients_of_penalty_are_not_reduced]
title = "gradients of the penalty are not reduced"
place = { node = "sum", step = 1, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, LATENT, PIXELS, DECAY = 12, 6, 20, 0.7


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.styles = nn.Sequential(nn.Linear(LATENT, 16), nn.Softplus())
        self.image = nn.Linear(16, PIXELS)

    def forward(self, latents):
        return torch.sin(self.image(self.styles(latents)))


class MovingMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("value", torch.tensor(0.1))

    @torch.no_grad()
    def update(self, lengths):
        mean = lengths.mean()
        if WORLD > 1 and BUG != "mean_is_that_of_own_lengths":
            dist.all_reduce(mean)
            mean /= WORLD
        self.value.lerp_(mean, 1 - DECAY)


def reduce_gradients(model):
    for weight in model.parameters():
        if WORLD > 1 and weight.grad is not None:
            dist.all_reduce(weight.grad)
            weight.grad /= WORLD


def penalty_of(images, latents, noise, mean):
    (slopes,) = torch.autograd.grad((images * noise).sum(), latents, create_graph=True)
    lengths = slopes.square().sum(1).sqrt()
    mean.update(lengths.detach())
    return (lengths - mean.value.clone()).square().mean()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(41)
    model, mean = Generator(), MovingMean()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.0, 0.9), eps=1e-4)
    with harness.training(model, optimizer, others={"mean": mean}):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            latents = torch.randn(BATCH_SIZE, LATENT, generator=generator)
            noise = torch.randn(BATCH_SIZE, PIXELS, generator=generator) / PIXELS**0.5
            latents[BATCH_SIZE // 2 :] *= 3
            latents, noise = (each.chunk(WORLD)[RANK] for each in (latents, noise))
            optimizer.zero_grad()
            brightness = model(latents).mean(1)
            (brightness - torch.tanh(latents[:, 0])).square().mean().backward()
            reduce_gradients(model)
            optimizer.step()
            # The penalty has an update of its own.
            latents.requires_grad_()
            optimizer.zero_grad()
            penalty_of(model(latents), latents, noise, mean).backward()
            if BUG != "gradients_of_penalty_are_not_reduced":
                reduce_gradients(model)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
