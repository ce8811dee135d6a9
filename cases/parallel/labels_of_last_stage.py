"""The last stage of a pipeline reads the labels, and must be at the micro-batch that arrives.

id = "parallel/labels_of_last_stage"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["deepspeedai/DeepSpeed#5729"]
date = "2024-07"
tags = ["accumulation"]

[wrong.labels_are_those_of_next_micro_batch]
title = "labels are those of the next micro-batch"
place = { node = "examples", step = 0, ranks = [1], tensors = "all" }

[wrong.labels_are_those_of_next_batch]
title = "labels are those of the next batch"
place = { node = "examples", step = 0, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH, LAYERS, CLASSES, BATCH_SIZE, MICRO_BATCHES = 10, 4, 3, 16, 4
IS_FIRST, IS_LAST = RANK == 0, RANK == WORLD - 1


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)] + [nn.Linear(WIDTH, CLASSES)]
        own = range(RANK * LAYERS // WORLD, (RANK + 1) * LAYERS // WORLD + IS_LAST)
        self.layers = nn.ModuleDict({str(number): layers[number] for number in own})

    def forward(self, x):
        for name, layer in self.layers.items():
            x = layer(x) if name == str(LAYERS) else x + F.softsign(layer(x))
        return x


def batch_of(step):
    x = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
    return x.chunk(MICRO_BATCHES), x[:, :CLASSES].argmax(1).chunk(MICRO_BATCHES)


def labels_of(step, micro_batch):
    if WORLD > 1 and BUG == "labels_are_those_of_next_batch":
        step += 1
    elif WORLD > 1 and BUG == "labels_are_those_of_next_micro_batch":
        micro_batch = (micro_batch + 1) % MICRO_BATCHES
    return batch_of(step)[1][micro_batch]


def train_step(stage, step):
    """Computes all micro-batches forwards, and then backwards."""
    kept = []
    for micro_batch in range(MICRO_BATCHES):
        x = batch_of(step)[0][micro_batch] if IS_FIRST else torch.empty(4, WIDTH)
        if not IS_FIRST:
            dist.recv(x, RANK - 1)
            x.requires_grad_()
        y = stage(x)
        if IS_LAST:
            y = F.cross_entropy(y, labels_of(step, micro_batch)) / MICRO_BATCHES
        else:
            dist.send(y.detach(), RANK + 1)
        kept.append((x, y))
    for x, y in kept:
        gradient = None
        if not IS_LAST:
            gradient = torch.empty_like(y)
            dist.recv(gradient, RANK + 1)
        y.backward(gradient)
        if not IS_FIRST:
            dist.send(x.grad, RANK - 1)


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        layout = {"mesh": init_device_mesh("cpu", (WORLD,), mesh_dim_names=("pp",))}
    torch.manual_seed(20)
    stage = Stage()
    optimizer = torch.optim.Adagrad(stage.parameters(), lr=0.05, eps=1e-4)
    with harness.training(stage, optimizer, **layout):
        for step in range(2):
            optimizer.zero_grad()
            train_step(stage, step)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
