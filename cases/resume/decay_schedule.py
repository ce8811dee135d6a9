"""A scheduler sets rate and weight decay, and takes a step before all of it is restored.

id = "resume/decay_schedule"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["NVIDIA/Megatron-LM#7468"]
date = "2026-09"
tags = ["fsdp2", "adam"]

[wrong.step_at_load_has_decay_of_arguments]
title = "the step at the load has the decay of the arguments"
place = { node = "update", step = 2, ranks = "all", tensors = "all" }

[wrong.decay_starts_again]
title = "the decay starts again"
place = { node = "update", step = 2, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, HALF, BATCH_SIZE, ALL_STEPS = 4, 2, 12, 6


class Scheduler:
    """Lowers the rate and raises the weight decay of all groups, linearly."""

    def __init__(self, optimizer, end_decay):
        self.optimizer, self.done, self.first_decay, self.end_decay = optimizer, 0, 0.1, end_decay
        self.step(0)

    def step(self, number=1):
        self.done += number
        part = self.done / ALL_STEPS
        decay = self.first_decay + part * (self.end_decay - self.first_decay)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.08 * (1 - part)
            group["weight_decay"] = decay

    def state_dict(self):
        return {"done": self.done, "end_decay": self.end_decay}

    def load_state_dict(self, state):
        if BUG == "step_at_load_has_decay_of_arguments":
            self.step(state["done"])
            self.end_decay = state["end_decay"]
            return
        self.end_decay = state["end_decay"]
        self.step(state["done"])
        if BUG == "decay_starts_again":
            for group in self.optimizer.param_groups:
                group["weight_decay"] = self.first_decay


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def load(model, optimizer, state):
    """Copies whole weights and moments into the parts of this rank."""
    for name, weight in model.named_parameters():
        own = {"weight": state["weights"][name], **state["moments"][name]}
        if isinstance(weight, DTensor):
            place = weight.device_mesh, weight.placements
            own = {k: distribute_tensor(v, *place) if v.ndim else v for k, v in own.items()}
        with torch.no_grad():
            weight.copy_(own.pop("weight"))
        optimizer.state[weight] = own


def main():
    torch.manual_seed(32)
    model = nn.Sequential(nn.Linear(6, 16), nn.Hardtanh(), nn.Linear(16, 4))
    if WORLD > 1:
        dist.init_process_group("gloo")
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    groups = [{"params": [*layer.parameters()]} for layer in (model[0], model[2])]
    optimizer = torch.optim.AdamW(groups, eps=1e-3)
    # A resumed run is started with another value, which the checkpoint's replaces.
    scheduler = Scheduler(optimizer, end_decay=0.4 if LOAD else 2.0)
    if LOAD:
        state = torch.load(LOAD + ".pt")
        load(model, optimizer, state)
        scheduler.load_state_dict(state["scheduler"])
    with harness.training(model, optimizer):
        for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
            x = torch.randn(BATCH_SIZE, 6, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            nn.functional.multilabel_soft_margin_loss(model(x), (x[:, :4] > 0).float()).backward()
            optimizer.step()
            scheduler.step()
    if SAVE:
        weights = {name: whole(weight.detach()) for name, weight in model.named_parameters()}
        moments = {
            name: {key: whole(value) for key, value in optimizer.state[weight].items()}
            for name, weight in model.named_parameters()
        }
        if RANK == 0:
            state = {"weights": weights, "moments": moments, "scheduler": scheduler.state_dict()}
            torch.save(state, SAVE + ".pt")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
