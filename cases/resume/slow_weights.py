"""Every second step, weights go back halfway to slow ones, which a checkpoint has to have as well.

id = "resume/slow_weights"
framework = "torch"
processes = 2
steps = 5
mode = "resume"
references = ["kozistr/pytorch_optimizer#310", "tensorflow/addons#2102"]
date = "2019-09"
tags = ["ddp", "averages", "sgd"]

[wrong.slow_weights_are_not_saved]
title = "slow weights are not saved"
place = { node = "start", step = 3, ranks = "all", tensors = ["slow.*"] }

[wrong.steps_are_counted_anew]
title = "steps are counted anew"
place = { node = "update", step = 3, ranks = "all", tensors = "all" }
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE, STEPS, SAVED_STEPS, EVERY = 16, 6, 5, 3, 2


@torch.no_grad()
def look_back(model, slow):
    for fast, kept in zip(model.parameters(), slow.parameters(), strict=True):
        kept.lerp_(fast, 0.5)
        fast.copy_(kept)


def main():
    save, load = os.environ.get("SAVE"), os.environ.get("LOAD")
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(225)
    model = nn.Sequential(nn.Linear(SIZE, 16), nn.ELU(), nn.Linear(16, 3))
    slow = copy.deepcopy(model).requires_grad_(False)
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3, momentum=0.9)
    first = count = 0
    if load:
        state = torch.load(load)
        model.load_state_dict(state["model"])
        is_saved = BUG != "slow_weights_are_not_saved"
        slow.load_state_dict(state["slow" if is_saved else "model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        count = 0 if BUG == "steps_are_counted_anew" else first
    last = SAVED_STEPS if save else STEPS
    with harness.training(ddp, optimizer, others={"slow": slow}):
        for step in range(first, last):
            x = torch.randn(BATCH_SIZE, SIZE, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.cross_entropy(ddp(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            count += 1
            if count % EVERY == 0:
                look_back(model, slow)
    if save and RANK == 0:
        state = {"model": model.state_dict(), "slow": slow.state_dict(), "step": last}
        torch.save(state | {"optimizer": optimizer.state_dict()}, save)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
