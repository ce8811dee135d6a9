"""Stages of a pipeline are set up again for another length, while gradients are accumulated.

id = "parallel/stages_set_up_again"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA-NeMo/Automodel#3530"]
date = "2026-08"
tags = ["pipeline", "embedding", "adam"]

[wrong.gradients_are_cleared_as_stages_are_set_up]
title = "gradients are cleared as stages are set up"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.gradients_of_last_stage_are_cleared]
title = "gradients of the last stage are cleared"
place = { node = "gradient", step = 0, ranks = [1], tensors = ["layers.2.*", "layers.3.*"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORDS, WIDTH, BATCH_SIZE, LENGTHS = 14, 10, 8, (5, 9, 7)
TOKENS = BATCH_SIZE * sum(LENGTHS)


class Block(nn.Module):
    """A convolution that sees earlier places only."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x):
        y = self.convolution(F.pad(x.transpose(1, 2), (2, 0)))
        return x + F.gelu(y.transpose(1, 2))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS)]
        self.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def loss_of(logits, targets):
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return losses / TOKENS


def set_up(model, mesh):
    """Makes a stage and its schedule for batches of a new shape."""
    stage = PipelineStage(model, RANK, WORLD, torch.device("cpu"), group=mesh.get_group())
    clears = BUG == "gradients_are_cleared_as_stages_are_set_up"
    clears |= BUG == "gradients_of_last_stage_are_cleared" and RANK == WORLD - 1
    for weight in model.parameters() if clears else ():
        weight.grad = None
    return Schedule1F1B(stage, 4, loss_fn=loss_of, scale_grads=False)


def main():
    mesh = None
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("pp",))
    torch.manual_seed(22)
    model = Network()
    if WORLD > 1:
        for name in [n for n in model.layers if int(n) * WORLD // 4 != RANK]:
            del model.layers[name]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-4)
    with harness.training(model, optimizer, mesh=mesh):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            for length in LENGTHS:
                text = torch.randint(WORDS, (BATCH_SIZE, length + 1), generator=generator)
                if WORLD == 1:
                    loss_of(model(text[:, :-1]), text[:, 1:]).backward()
                elif RANK == 0:
                    set_up(model, mesh).step(text[:, :-1].contiguous())
                else:
                    set_up(model, mesh).step(target=text[:, 1:].contiguous())
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
