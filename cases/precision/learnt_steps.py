"""The step of a quantiser is learnt, with a gradient divided by the root of how many values it has.

id = "precision/learnt_steps"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["zhutmost/lsq-net#23", "microsoft/nni#3503"]
date = "2021-05"
tags = ["quantised", "sgd"]

[wrong.values_of_own_rank_are_counted]
title = "values of the own rank are counted"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["quantise.size"] }

[wrong.gradient_of_size_has_few_digits]
title = "the gradient of the size has few digits"
place = { node = "sum", step = 0, ranks = "all", tensors = ["quantise.size"] }

[wrong.size_itself_is_scaled]
title = "the size itself is scaled"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["quantise", "leave"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE, WIDTH, LEVELS = 16, 6, 16, 7


def rounded(x):
    """Rounds, with the gradient of the identity."""
    return x + (x.round() - x).detach()


class Quantise(nn.Module):
    """Rounds values of a batch to multiples of a learnt size, up to the highest level."""

    def __init__(self):
        super().__init__()
        self.size = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        ranks = 1 if BUG == "values_of_own_rank_are_counted" else WORLD
        factor = (x.numel() * ranks * LEVELS) ** -0.5
        size = self.size * factor
        if BUG != "size_itself_is_scaled":
            size = size + (self.size - size).detach()
        return rounded((x / size).clamp(0, LEVELS)) * size


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, 2)
        self.quantise = Quantise()

    def forward(self, x):
        return self.leave(self.quantise(torch.relu(self.enter(x))))


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(219)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, SIZE, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.mse_loss(model(x), x[:, :2] * x[:, 2:4]).backward()
            size, few = model.quantise.size, model.quantise.size.grad.bfloat16()
            average([few, *(weight.grad for weight in model.parameters())])
            if WORLD > 1 and BUG == "gradient_of_size_has_few_digits":
                size.grad.copy_(few)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
