"""A resumed training skips the batches that it has seen, in its first epoch and in all later ones.

id = "resume/skipped_batches"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["allenai/open-instruct#681", "verl-project/verl#7401"]
date = "2025-05"
tags = ["ddp", "loader"]

[wrong.skipped_in_every_epoch]
title = "skipped in every epoch"
place = { node = "examples", step = 3, ranks = "all", tensors = "all" }

[wrong.skipped_by_sampler_and_by_loop]
title = "skipped by the sampler and by the loop"
place = { node = "examples", step = 2, ranks = "all", tensors = "all" }

[wrong.epoch_begins_again]
title = "the epoch begins again"
place = { node = "examples", step = 2, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, HALF, EXAMPLES, BATCH = 4, 2, 24, 8


class SkippingSampler(DistributedSampler):
    skipped = 0

    def __iter__(self):
        yield from list(super().__iter__())[self.skipped * BATCH // WORLD :]


def batches(loader, done):
    """Yields batches of all epochs after the first `done` ones."""
    epoch, skipped = divmod(done, EXAMPLES // BATCH)
    if BUG == "epoch_begins_again":
        skipped = 0
    while True:
        loader.sampler.set_epoch(epoch)
        loader.sampler.skipped = skipped
        for i, batch in enumerate(loader):
            if BUG == "skipped_by_sampler_and_by_loop" and i < skipped:
                continue
            yield batch
        epoch += 1
        if BUG != "skipped_in_every_epoch":
            skipped = 0


def main():
    torch.manual_seed(8)
    x = torch.randn(EXAMPLES, 9)
    dataset = TensorDataset(x, x.abs().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(9, 16), nn.GELU(), nn.Linear(16, 1))
    if WORLD > 1:
        dist.init_process_group("gloo")
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, eps=1e-3)
    done = 0
    if LOAD:
        state = torch.load(LOAD + ".pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    sampler = SkippingSampler(dataset, WORLD, RANK, shuffle=True, seed=3)
    loader = DataLoader(dataset, BATCH // WORLD, sampler=sampler, drop_last=True)
    last = HALF if SAVE else STEPS
    with harness.training(ddp, optimizer):
        for _, (x, y) in zip(range(done, last), batches(loader, done), strict=False):
            optimizer.zero_grad()
            nn.functional.huber_loss(ddp(x), y).backward()
            optimizer.step()
    if SAVE and RANK == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": last}
        torch.save(state, SAVE + ".pt")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
