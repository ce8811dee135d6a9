"""The last batch cannot be split evenly: it is filled up, dropped, or averaged by rank.

reference = "pytorch/pytorch#22584, pytorch/pytorch#67253"
date = "2019-07"
framework = "torch"

[wrong]
"filled up with repeated examples" = ["sampler_padding", "repeated_examples"]
"last batch is dropped" = ["last_batch_dropped", "other_examples", "other_batch_size"]
"mean of the ranks' means" = ["mean_of_means"]
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH, EXAMPLES, STEPS = 8, 11, 2


def endless(loader):
    while True:
        yield from loader


def reduce(value):
    if WORLD > 1:
        dist.all_reduce(value)
    return value


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(8)
    x = torch.randn(EXAMPLES, 7)
    data = TensorDataset(x, (3 * x[:, 0]).cos() + x[:, 1])
    sampler = range(RANK, EXAMPLES, WORLD)
    if BUG == "filled up with repeated examples":
        sampler = DistributedSampler(data, WORLD, RANK, shuffle=False)
    is_dropped = BUG == "last batch is dropped"
    loader = DataLoader(data, BATCH // WORLD, sampler=sampler, drop_last=is_dropped)
    model = nn.Sequential(nn.Linear(7, 24), nn.ReLU(), nn.Linear(24, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-2)
    with lockstep.record(model, optimizer):
        for _, (x, y) in zip(range(STEPS), endless(loader), strict=False):
            count = reduce(torch.tensor(float(len(x))))
            if BUG == "mean of the ranks' means":
                count = torch.tensor(float(len(x) * WORLD))
            optimizer.zero_grad()
            (nn.functional.huber_loss(model(x), y, reduction="sum") / count).backward()
            for p in model.parameters():
                reduce(p.grad)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
