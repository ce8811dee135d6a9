"""Times of a flow, up to 1000, are cast to the dtype of the model before they are embedded.

id = "precision/time_of_noise"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["modelscope/DiffSynth-Studio#562", "huggingface/diffusers#9405", "utensils/mold#786"]
date = "2024-09"
tags = ["fsdp2", "low_precision", "adam"]

[wrong.times_are_rounded_to_bfloat16]
title = "times are rounded to bfloat16"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["time"] }

[wrong.times_are_rounded_to_bfloat16_after_division]
title = "times are rounded to bfloat16 after the division"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["time"] }

[wrong.frequencies_are_rounded_to_bfloat16]
title = "frequencies are rounded to bfloat16"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["time"] }
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
BATCH_SIZE, SIZE, WIDTH, FREQUENCIES = 16, 6, 20, 8


def rounded(x):
    return x.bfloat16().float()


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Linear(2 * FREQUENCIES, WIDTH)
        self.enter, self.leave = nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, SIZE)

    def embed(self, times):
        """Returns cosines and sines of times, for a time of 1000 with up to 1000 in radians."""
        if BUG == "times_are_rounded_to_bfloat16":
            times = rounded(times)
        elif BUG == "times_are_rounded_to_bfloat16_after_division":
            times = rounded(times / 1000) * 1000
        frequencies = 1000 ** (-torch.arange(FREQUENCIES) / FREQUENCIES)
        if BUG == "frequencies_are_rounded_to_bfloat16":
            frequencies = rounded(frequencies)
        angles = times[:, None] * frequencies
        return torch.cat([angles.cos(), angles.sin()], 1)

    def forward(self, x, times):
        scale = self.time(self.embed(times))
        return self.leave(F.gelu(self.enter(x) * (1 + scale)))


def main():
    torch.manual_seed(40)
    model = Flow()
    if WORLD > 1:
        dist.init_process_group("gloo")
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            data = torch.randn(BATCH_SIZE, SIZE, generator=generator).sign()
            noise = torch.randn(BATCH_SIZE, SIZE, generator=generator)
            times = 1000 * torch.rand(BATCH_SIZE, generator=generator)
            x = torch.lerp(data, noise, times[:, None] / 1000)
            x, times, target = (a.chunk(WORLD)[RANK] for a in (x, times, noise - data))
            optimizer.zero_grad()
            F.mse_loss(model(x, times), target).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
