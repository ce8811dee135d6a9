"""After a resume, the loader is at the saved place, but in the order of another epoch.

id = "data/loader_after_resume"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "huggingface/accelerate#4195",
    "huggingface/accelerate#3938",
    "mosaicml/streaming#437",
]
date = "2026-08"
tags = ["ddp", "adam"]

[wrong.order_of_epoch_0]
title = "order of epoch 0"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }

[wrong.place_of_rank_0_is_restored_on_no_other]
title = "place of rank 0 is restored on no other"
place = { node = "examples", step = 0, ranks = [1], tensors = "all" }

[wrong.batches_of_all_ranks_are_skipped]
title = "batches of all ranks are skipped"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXAMPLES, BATCH = 48, 8


class Loader:
    """Yields the indices of a rank's part of each batch of an epoch."""

    def __init__(self):
        self.epoch, self.batch = 0, 0

    def load_state_dict(self, state):
        self.epoch, self.batch = state["epoch"], state["batch"]
        if BUG == "order_of_epoch_0":
            self.epoch = 0
        elif BUG == "place_of_rank_0_is_restored_on_no_other" and RANK > 0:
            self.batch = 0
        elif BUG == "batches_of_all_ranks_are_skipped":
            self.batch *= WORLD

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        batches = torch.randperm(EXAMPLES, generator=generator).split(BATCH)
        for batch in batches[self.batch :]:
            yield batch[RANK::WORLD]
        self.epoch, self.batch = self.epoch + 1, 0


def main():
    torch.manual_seed(11)
    x = torch.randn(EXAMPLES, 6)
    y = (x[:, ::2].sum(1) > x[:, 1::2].sum(1)).float()
    model = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(), nn.Linear(12, 1), nn.Flatten(0))
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)
    loader = Loader()
    loader.load_state_dict({"epoch": 1, "batch": 2})  # From the checkpoint.
    with harness.training(model, optimizer):
        for _, own in zip(range(2), loader, strict=False):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(x[own]), y[own]).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
