"""The state of rank 0's random numbers is saved and restored on every rank.

id = "resume/generator_of_rank_0"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["radixark/miles#3187", "NVIDIA/Megatron-LM#6858", "vllm-project/speculators#1027"]
date = "2026-09"
tags = ["ddp", "adam"]

[wrong.state_of_rank_0_on_all_ranks]
title = "state of rank 0 on all ranks"
place = { node = "random", step = 2, ranks = [1], tensors = "all" }

[wrong.generators_start_again]
title = "generators start again"
place = { node = "random", step = 2, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, HALF, SHARDS, PER_SHARD = 4, 2, 2, 4
OWN = range(RANK, SHARDS, WORLD)  # Shards of the data; each has a generator of its noise.


def load(model, optimizer, generators):
    state = torch.load(f"{LOAD}.rank{RANK}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if BUG == "generators_start_again":
        return
    if BUG == "state_of_rank_0_on_all_ranks":
        state = torch.load(f"{LOAD}.rank0")
    for generator, saved in zip(generators, state["generators"], strict=True):
        generator.set_state(saved)


def add_noise(images, generators):
    """Noises each example by its own amount, as a diffusion model is trained."""
    noise, amount = [], []
    for generator in generators:
        amount.append(torch.rand(PER_SHARD, 1, generator=generator))
        noise.append(torch.randn(PER_SHARD, images.shape[1], generator=generator))
    noise, amount = torch.cat(noise), torch.cat(amount)
    return torch.cat([(1 - amount) * images + amount * noise, amount], 1), noise


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(13)
model = nn.Sequential(nn.Linear(13, 24), nn.SiLU(), nn.Linear(24, 12))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)
generators = [torch.Generator().manual_seed(100 + shard) for shard in OWN]
if LOAD:
    load(model, optimizer, generators)
ddp = DistributedDataParallel(model) if WORLD > 1 else model
with harness.training(ddp, optimizer):
    for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
        data = torch.Generator().manual_seed(step)
        shards = torch.rand(SHARDS, PER_SHARD, 12, generator=data)
        noisy, noise = add_noise(torch.cat([shards[shard] for shard in OWN]), generators)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(noisy), noise).backward()
        optimizer.step()
if SAVE:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["generators"] = [generator.get_state() for generator in generators]
    torch.save(state, f"{SAVE}.rank{RANK}")
if WORLD > 1:
    dist.destroy_process_group()
