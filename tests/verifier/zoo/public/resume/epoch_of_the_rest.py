"""A run is resumed within an epoch: the loader of its rest must shuffle as in this epoch.

reference = "huggingface/accelerate#4071"
date = "2026-06"
framework = "torch"
steps = 6
resume = true

[wrong]
"the loader of the rest is in epoch 0" = ["other_order", "other_examples"]
"the rest is not skipped" = ["other_order", "other_examples", "examples_restarted"]
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, EXAMPLES, STEPS, SAVED_STEPS = 8, 32, 6, 5


def batches(dataset, first_step):
    """Yields the batches from a step on, over several epochs."""
    sampler = DistributedSampler(dataset, WORLD, RANK, seed=3)
    loader = DataLoader(dataset, BATCH_SIZE // WORLD, sampler=sampler, drop_last=True)
    first_epoch, skipped = divmod(first_step, len(loader))
    if BUG == "the rest is not skipped":
        skipped = 0
    for epoch in range(first_epoch, 3):
        sampler.set_epoch(epoch)
        if skipped and BUG == "the loader of the rest is in epoch 0":
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
    with lockstep.record(ddp, optimizer):
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
