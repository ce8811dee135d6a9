"""A run is saved while gradients are accumulated: those that are there belong to the checkpoint.

id = "resume/half_accumulated"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["huggingface/transformers#22143", "Nerogar/OneTrainer#1465"]
date = "2023-03"
tags = ["ddp", "accumulation", "adam"]

[wrong.gradients_are_not_saved]
title = "gradients are not saved"
place = { node = "gradient", step = 2, ranks = "all", tensors = "all" }

[wrong.window_starts_again]
title = "the window starts again, with the gradients that are there"
place = { node = "gradient", step = 2, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE, WINDOW, MICRO_BATCHES, SAVED = 8, 5, 2, 8, 5


def main():
    save, load = os.environ.get("SAVE"), os.environ.get("LOAD")
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(224)
    model = nn.Sequential(nn.Linear(SIZE, 14), nn.Tanh(), nn.Linear(14, 1))
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.02, eps=1e-3)
    first, waiting = 0, 0
    if load:
        state = torch.load(load)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, waiting = state["seen"], state["seen"] % WINDOW
        if BUG == "window_starts_again":
            waiting = 0
        if BUG != "gradients_are_not_saved":
            for weight, grad in zip(model.parameters(), state["grads"], strict=True):
                weight.grad = grad
    last = SAVED if save else MICRO_BATCHES
    with harness.training(ddp, optimizer):
        for number in range(first, last):
            x = torch.randn(BATCH_SIZE, SIZE, generator=torch.Generator().manual_seed(number))
            x = x.chunk(WORLD)[RANK]
            (F.mse_loss(ddp(x)[:, 0], x.sum(1).sin()) / WINDOW).backward()
            waiting += 1
            if waiting == WINDOW:
                optimizer.step()
                optimizer.zero_grad()
                waiting = 0
    if save and RANK == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "seen": last}
        torch.save(state | {"grads": [weight.grad for weight in model.parameters()]}, save)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
