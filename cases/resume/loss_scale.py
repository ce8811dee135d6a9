"""The loss scale is not in the checkpoint: a resumed float16 training overflows and skips a step.

id = "resume/loss_scale"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["huggingface/transformers#34053", "huggingface/transformers#11663"]
date = "2024-11"
tags = ["ddp", "low_precision", "sgd"]

[wrong.scale_is_not_restored]
title = "the scale is not restored"
place = { node = "gradient", step = 2, ranks = "all", tensors = "all" }

[wrong.only_rank_0_restores_scale]
title = "only rank 0 restores the scale"
place = { node = "gradient", step = 2, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, HALF, BATCH = 4, 2, 8


class HalfOutput(nn.Module):
    """Outputs and their gradients are float16, the layers float32."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4))

    def forward(self, x):
        return self.layers(x).half()


def is_scale_restored():
    if BUG == "only_rank_0_restores_scale":
        return RANK == 0
    return BUG != "scale_is_not_restored"


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(2)
    model = HalfOutput()
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.8)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**21, backoff_factor=2.0**-7)
    if LOAD:
        state = torch.load(LOAD + ".pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if is_scale_restored():
            scaler.load_state_dict(state["scaler"])
    with harness.training(ddp, optimizer):
        for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
            x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))
            x, y = x[RANK::WORLD], x[:, :4].argmin(1)[RANK::WORLD]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    if SAVE and RANK == 0:
        state = {"model": model, "optimizer": optimizer, "scaler": scaler}
        torch.save({name: part.state_dict() for name, part in state.items()}, SAVE + ".pt")
    if WORLD > 1:
        dist.destroy_process_group()


main()
