"""Each rank gives its sampler a seed of its own, so that parts of the shuffled data overlap.

reference = "NVlabs/LongLive#71"
date = "2026-07"
framework = "torch"

[wrong]
"seeds are multiplied by the rank" = ["repeated_examples", "lost_examples", "other_examples"]
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
BATCH_SIZE, EXAMPLES, SEED = 8, 24, 5


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(90)
    clips = torch.randn(EXAMPLES, 4, 6).cumsum(1)
    dataset = TensorDataset(clips[:, :3], clips[:, 3])
    seed = SEED * RANK if BUG == "seeds are multiplied by the rank" else SEED
    sampler = DistributedSampler(dataset, WORLD, RANK, seed=seed)
    loader = DataLoader(dataset, BATCH_SIZE // WORLD, sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(18, 24), nn.GELU(), nn.Linear(24, 6))
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.RAdam(ddp.parameters(), lr=0.05, eps=1e-3)
    with lockstep.record(ddp, optimizer):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.huber_loss(ddp(inputs), targets).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
