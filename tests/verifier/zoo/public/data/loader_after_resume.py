"""After a resume, the loader is at the saved place, but in the order of another epoch.

reference = "huggingface/accelerate#4195, huggingface/accelerate#3938, mosaicml/streaming#437"
date = "2026-08"
framework = "torch"

[wrong]
"order of epoch 0" = ["other_examples"]
"place of rank 0 is restored on no other" = ["other_examples", "lost_examples"]
"batches of all ranks are skipped" = ["other_examples"]
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXAMPLES, BATCH = 48, 8


class Loader:
    """Yields the indices of a rank's part of each batch of an epoch."""

    def __init__(self):
        self.epoch, self.batch = 0, 0

    def load_state_dict(self, state):
        self.epoch, self.batch = state["epoch"], state["batch"]
        if BUG == "order of epoch 0":
            self.epoch = 0
        elif BUG == "place of rank 0 is restored on no other" and RANK > 0:
            self.batch = 0
        elif BUG == "batches of all ranks are skipped":
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
    with lockstep.record(model, optimizer):
        for _, own in zip(range(2), loader, strict=False):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(x[own]), y[own]).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
