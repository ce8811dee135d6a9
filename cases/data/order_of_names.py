"""The names of variables are a set, whose order is another one in each process.

id = "data/order_of_names"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["ai2cm/ace#1466"]
date = "2026-08"
tags = ["ddp", "adam"]

[wrong.weights_of_loss_are_in_order_of_set]
title = "weights of the loss are in the order of a set"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.variables_of_targets_are_in_order_of_set]
title = "variables of the targets are in the order of a set"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
"""

import os
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
NAMES = ("height", "humidity", "pressure", "temperature", "wind")
WEIGHTS = {"height": 0.5, "humidity": 2.0, "pressure": 1.0, "temperature": 3.0, "wind": 0.2}
BATCH_SIZE, POINTS = 8, 10


def in_order_of_a_set(names):
    """Returns the names in the order of their hashes, which depend on the process."""
    return sorted(names, key=lambda name: zlib.crc32(f"{name} {RANK}".encode()))


def names_for(mistake):
    return in_order_of_a_set(NAMES) if mistake == BUG else NAMES


def batch_of(step):
    """Returns the fields of each variable, and those of the next time."""
    values = torch.randn(2, len(NAMES), BATCH_SIZE, POINTS + 1)
    fields = dict(zip(NAMES, values[step], strict=True))
    return (
        {name: field[:, 1:] for name, field in fields.items()},
        {name: field[:, :-1] * 0.8 + 0.1 * i for i, (name, field) in enumerate(fields.items())},
    )


def stacked(fields, names):
    return torch.stack([fields[name][RANK::WORLD] for name in names], 1)


def main():
    torch.manual_seed(35)
    model = nn.Sequential(
        nn.Conv1d(len(NAMES), 16, 3, padding=1, padding_mode="circular"), nn.GELU(),
        nn.Conv1d(16, len(NAMES), 3, padding=1, padding_mode="circular"),
    )  # fmt: skip
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-4)
    order = names_for("weights_of_loss_are_in_order_of_set")
    weights = torch.tensor([WEIGHTS[name] for name in order])[:, None]
    with harness.training(model, optimizer):
        for step in range(2):
            now, later = batch_of(step)
            outputs = model(stacked(now, NAMES))
            order = names_for("variables_of_targets_are_in_order_of_set")
            errors = outputs - stacked(later, order)
            optimizer.zero_grad()
            (weights * errors.square()).mean().backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
