"""A state space layer keeps logarithms of its decays, whose exponential needs float32.

id = "precision/decay_of_states"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["state-spaces/mamba#923"]
date = "2026-04"
tags = ["ddp", "low_precision", "sgd"]

[wrong.decays_are_computed_in_bfloat16]
title = "decays are computed in bfloat16"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["1", "2"] }

[wrong.decays_of_second_layer_are_computed]
title = "decays of the second layer are computed in bfloat16"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["2"] }
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
SIZE, WIDTH, STATES, LENGTH, BATCH_SIZE = 3, 6, 8, 16, 8


def rounded(x):
    return x.bfloat16().float()


class StateSpace(nn.Module):
    """Each channel has states that decay by steps whose sizes depend on the input."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        states = torch.arange(1.0, STATES + 1).expand(WIDTH, -1)
        self.log_decays = nn.Parameter(torch.log(1.03 * states))
        self.steps = nn.Linear(WIDTH, WIDTH)
        self.enter, self.leave = nn.Linear(WIDTH, STATES), nn.Linear(WIDTH, STATES)

    def forward(self, x):
        names = ["decays_are_computed_in_bfloat16"]
        if self.number == 1:
            names.append("decays_of_second_layer_are_computed")
        logs = rounded(self.log_decays) if BUG in names else self.log_decays
        decays = -torch.exp(logs)
        decays = rounded(decays) if BUG in names else decays
        steps = F.softplus(self.steps(x))
        enter, leave, state, outputs = self.enter(x), self.leave(x), 0.0, []
        for t in range(x.shape[1]):
            step = steps[:, t, :, None]
            state = torch.exp(step * decays) * state + step * enter[:, t, None] * x[:, t, :, None]
            outputs.append((state * leave[:, t, None]).sum(-1))
        return x + torch.stack(outputs, 1)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(33)
    layers = [nn.Linear(SIZE, WIDTH), StateSpace(0), StateSpace(1), nn.Linear(WIDTH, SIZE)]
    model = nn.Sequential(*layers)
    if WORLD > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH_SIZE, LENGTH + 1, SIZE, generator=generator).cumsum(1)
            x = torch.sin(x).chunk(WORLD)[RANK]
            loss = F.mse_loss(model(x[:, :-1]), x[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
