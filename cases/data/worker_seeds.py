"""Workers are seeded by their number alone, so that those of all ranks draw the same noise.

id = "data/worker_seeds"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#37932", "pytorch/pytorch#5059"]
date = "2025-05"
tags = ["ddp", "loader"]

[wrong.seed_from_number_of_worker]
title = "seed from the number of the worker"
place = { node = "random", step = 0, ranks = "all", tensors = "all" }

[wrong.one_seed_for_all_workers]
title = "one seed for all workers"
place = { node = "random", step = 0, ranks = "all", tensors = "all" }
"""

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, get_worker_info

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SEED, BATCH = 3, 8


class Augmented(Dataset):
    """Examples with noise, which the right program draws for each example alone."""

    def __init__(self):
        generator = np.random.default_rng(SEED)
        self.x = generator.normal(size=(32, 5)).astype("float32")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        random = np.random if BUG else np.random.RandomState(1000 * SEED + index)
        noisy = self.x[index] + random.normal(size=5).astype("float32")
        return noisy, np.tanh(self.x[index, :2])


def seed_worker(number):
    if BUG == "seed_from_number_of_worker":
        np.random.seed(SEED + number)
    elif BUG == "one_seed_for_all_workers":
        np.random.seed(SEED)
    assert get_worker_info().id == number


def main():
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(5, 20), nn.ELU(), nn.Linear(20, 2))
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    indices = [
        list(range(step * BATCH + RANK, (step + 1) * BATCH, WORLD)) for step in range(32 // BATCH)
    ]
    loader = DataLoader(
        Augmented(), batch_sampler=indices, num_workers=2, worker_init_fn=seed_worker
    )
    with harness.training(model, optimizer):
        for _, (x, y) in zip(range(2), loader, strict=False):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
