"""A run is resumed within an epoch: the loader of its rest must shuffle as in this epoch.

id = "resume/epoch_of_the_rest"
framework = "torch"
processes = 2
steps = 6
mode = "resume"
references = ["huggingface/accelerate#4071"]
date = "2026-06"
tags = ["ddp", "loader", "adam"]

[wrong.loader_of_rest_is_in_epoch_0]
title = "the loader of the rest is in epoch 0"
place = { node = "examples", step = 5, ranks = "all", tensors = "all" }

[wrong.rest_is_not_skipped]
title = "the rest is not skipped"
place = { node = "examples", step = 5, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, EXAMPLES, STEPS, SAVED_STEPS = 8, 32, 6, 5


def batches(dataset, first_step):
    """Yields the batches from a step on, over several epochs."""
    sampler = DistributedSampler(dataset, WORLD, RANK, seed=3)
    loader = DataLoader(dataset, BATCH_SIZE // WORLD, sampler=sampler, drop_last=True)
    first_epoch, skipped = divmod(first_step, len(loader))
    if BUG == "rest_is_not_skipped":
        skipped = 0
    for epoch in range(first_epoch, 3):
        sampler.set_epoch(epoch)
        if skipped and BUG == "loader_of_rest_is_in_epoch_0":
            sampler.set_epoch(0)
        for number, batch in enumerate(loader):
            if number >= skipped:
                yield batch
        skipped = 0


def main():
    save, load = os.environ.get("SAVE"), os.environ.get("LOAD")
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(80)
    x = torch.randn(EXAMPLES, 6)
    dataset = TensorDataset(x, (x[:, 0] * x[:, 1] + x[:, 2])[:, None])
    model = nn.Sequential(nn.Linear(6, 16), nn.Mish(), nn.Linear(16, 1))
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.NAdam(ddp.parameters(), lr=0.02, eps=1e-3)
    step = 0
    if load:
        state = torch.load(load)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    with harness.training(ddp, optimizer):
        for inputs, targets in batches(dataset, step):
            optimizer.zero_grad()
            F.smooth_l1_loss(ddp(inputs), targets).backward()
            optimizer.step()
            step += 1
            if step == (SAVED_STEPS if save else STEPS):
                break
    if save and RANK == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, save)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
