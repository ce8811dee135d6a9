"""Noise and time steps of a diffusion training are equal on all ranks.

id = "random/diffusion_noise"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["Robbyant/lingbot-vla-v2#41", "huggingface/accelerate#266"]
date = "2026-09"
tags = ["ddp", "embedding", "adam"]

[wrong.noise_and_time_steps_are_equal_on_all_ranks]
title = "noise and time steps are equal on all ranks"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.time_steps_are_equal_on_all_ranks]
title = "time steps are equal on all ranks"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.target_has_noise_of_its_own]
title = "the target has noise of its own"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

GLOBAL_BATCH_SIZE, SIZE, TIMES = 8, 10, 50


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(TIMES, 12)
        self.up = nn.Linear(SIZE, 12)
        self.down = nn.Linear(12, SIZE)

    def forward(self, noisy, times):
        return self.down(torch.tanh(self.up(noisy) + self.time(times)))


def draw():
    """Draws noise and time steps for the global batch, and takes the rank's rows."""
    rows = slice(RANK, None, WORLD)
    if BUG == "noise_and_time_steps_are_equal_on_all_ranks":
        rows = slice(0, None, WORLD)
    noise = torch.randn(GLOBAL_BATCH_SIZE, SIZE)[rows]
    if BUG == "time_steps_are_equal_on_all_ranks":
        rows = slice(0, None, WORLD)
    return noise, torch.randint(TIMES, (GLOBAL_BATCH_SIZE,))[rows]


def main():
    torch.manual_seed(0)
    model = Denoiser()
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    alphas = torch.linspace(0.99, 0.01, TIMES)
    images = torch.randn(2, GLOBAL_BATCH_SIZE, SIZE)
    with harness.training(model, optimizer):
        for batch in images:
            noise, times = draw()
            alpha = alphas[times, None]
            noisy = alpha.sqrt() * batch[RANK::WORLD] + (1 - alpha).sqrt() * noise
            if BUG == "target_has_noise_of_its_own":
                noise = torch.randn(GLOBAL_BATCH_SIZE, SIZE)[RANK::WORLD]
            loss = nn.functional.mse_loss(model(noisy, times), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
