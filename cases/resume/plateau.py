"""The rate falls after steps without progress, whose number is not in the checkpoint.

id = "resume/plateau"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["huggingface/pytorch-image-models#2756", "facebookresearch/fairseq#4071"]
date = "2021-12"
tags = ["fsdp2"]

[wrong.number_of_steps_without_progress_starts]
title = "the number of steps without progress starts again"
place = { node = "update", step = 3, ranks = "all", tensors = "all" }

[wrong.scheduler_starts_again]
title = "the scheduler starts again"
place = { node = "update", step = 3, ranks = "all", tensors = "all" }
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
STEPS, HALF, BATCH_SIZE = 4, 2, 16


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def state_of(model, optimizer):
    """Returns whole weights and their moving squares."""
    return {
        name: (whole(weight.detach()), whole(optimizer.state[weight]["square_avg"]))
        for name, weight in model.named_parameters()
    }


@torch.no_grad()
def load(model, optimizer, state):
    for name, weight in model.named_parameters():
        values = state[name]
        if isinstance(weight, DTensor):
            place = weight.device_mesh, weight.placements
            values = [distribute_tensor(value, *place) for value in values]
        weight.copy_(values[0])
        optimizer.state[weight] = {"step": torch.tensor(float(HALF)), "square_avg": values[1]}


def load_scheduler(scheduler, optimizer, state, rate):
    if BUG == "number_of_steps_without_progress_starts":
        state = {name: state[name] for name in ("best", "last_epoch")}
    if BUG != "scheduler_starts_again":
        scheduler.load_state_dict(state)
    optimizer.param_groups[0]["lr"] = rate


def main():
    torch.manual_seed(18)
    model = nn.Sequential(nn.Linear(5, 16), nn.Softsign(), nn.Linear(16, 1))
    if WORLD > 1:
        dist.init_process_group("gloo")
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.05, alpha=0.8, eps=1e-3)
    # Progress is a loss that is by more than a half lower than the best one.
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.2, patience=1, threshold=0.5
    )
    if LOAD:
        state = torch.load(LOAD + ".pt")
        load(model, optimizer, state["model"])
        load_scheduler(scheduler, optimizer, state["scheduler"], state["rate"])
    with harness.training(model, optimizer):
        for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
            x = torch.randn(BATCH_SIZE, 5, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            target = 3 + x.norm(dim=1, keepdim=True)
            loss = nn.functional.gaussian_nll_loss(model(x), target, torch.ones_like(target))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = loss.detach().clone()
            if WORLD > 1:
                dist.all_reduce(total)
            scheduler.step(total / WORLD)
    if SAVE:
        state = {"model": state_of(model, optimizer), "scheduler": scheduler.state_dict()}
        state["rate"] = optimizer.param_groups[0]["lr"]
        if RANK == 0:
            torch.save(state, SAVE + ".pt")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
