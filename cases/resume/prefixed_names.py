"""A checkpoint has the names of the wrapped model, and names that do not fit are passed over.

id = "resume/prefixed_names"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["nayeemrizve/OpenLDN#5", "pytorch/examples#1029"]
date = "2022-08"
tags = ["ddp", "sgd"]

[wrong.names_have_prefix_of_wrapper]
title = "names have the prefix of the wrapper"
place = { node = "start", step = 2, ranks = "all", tensors = "all" }

[wrong.only_parameters_are_saved]
title = "only parameters are saved"
place = { node = "start", step = 2, ranks = "all", tensors = ["mean"] }
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
STEPS, HALF, BATCH_SIZE = 4, 2, 12


class Regressor(nn.Module):
    """Subtracts a moving mean of the inputs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.register_buffer("mean", torch.zeros(6))

    @torch.no_grad()
    def follow(self, x):
        mean = x.mean(0)
        if WORLD > 1:
            dist.all_reduce(mean)
        self.mean.lerp_(mean / WORLD, 0.4)

    def forward(self, x):
        return self.layers(x - self.mean)


def save(model, wrapped, optimizer):
    state = model.state_dict()
    if BUG == "names_have_prefix_of_wrapper":
        state = wrapped.state_dict()
    elif BUG == "only_parameters_are_saved":
        state = dict(model.named_parameters())
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, SAVE + ".pt")


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(16)
    model = Regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    if LOAD:
        state = torch.load(LOAD + ".pt")
        model.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
    wrapped = DistributedDataParallel(model, broadcast_buffers=False) if WORLD > 1 else model
    with harness.training(wrapped, optimizer):
        for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
            x = 1.5 + torch.randn(BATCH_SIZE, 6, generator=torch.Generator().manual_seed(step))
            own = x[RANK::WORLD]
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(own), own[:, :2] * own[:, 2:4]).backward()
            optimizer.step()
            model.follow(own)
    if SAVE and RANK == 0:
        save(model, wrapped, optimizer)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
