"""The average of the weights is kept in the dtype of a copy for inference, and stands still.

reference = "d8ahazard/sd_dreambooth_extension#1415, d8ahazard/sd_dreambooth_extension#1417"
date = "2023-12"
framework = "torch"

[wrong]
"the average is kept in bfloat16" = ["reduced_precision", "other_average", "other_state_precision"]
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, DECAY = 16, 0.99


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(93)
    model = nn.Sequential(nn.Linear(6, 20), nn.SiLU(), nn.Linear(20, 6))
    average = copy.deepcopy(model).requires_grad_(False)
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3, momentum=0.9)
    with lockstep.record(ddp, optimizer, others={"average": average}):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x, noise = torch.randn(2, BATCH_SIZE, 6, generator=generator)
            x, noise = x.chunk(WORLD)[RANK], noise.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.mse_loss(ddp(x + noise), noise).backward()
            optimizer.step()
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                new = torch.lerp(slow, fast.detach(), 1 - DECAY)
                if BUG == "the average is kept in bfloat16":
                    new = new.bfloat16().float()
                slow.copy_(new)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
