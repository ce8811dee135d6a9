"""The first and the last stage of a pipeline share the embedding, of which each has a copy.

id = "parallel/tied_stages"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["uw-syfi/piper#13", "NVIDIA/Megatron-LM#299"]
date = "2023-03"
tags = ["embedding", "sgd"]

[wrong.gradients_of_copies_are_not_added]
title = "gradients of the copies are not added"
place = { node = "sum", step = 0, ranks = "all", tensors = ["embed.weight"] }

[wrong.gradients_of_copies_are_averaged]
title = "gradients of the copies are averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = ["embed.weight"] }

[wrong.last_stage_draws_its_copy]
title = "the last stage draws its copy"
place = { node = "start", step = 0, ranks = [1], tensors = ["embed.weight"] }
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
WORDS, WIDTH, LAYERS, BATCH_SIZE, LENGTH = 13, 10, 4, 8, 6
IS_FIRST, IS_LAST = RANK == 0, RANK == WORLD - 1


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        every = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        own = range(RANK * LAYERS // WORLD, (RANK + 1) * LAYERS // WORLD)
        self.layers = nn.ModuleDict({str(number): every[number] for number in own})
        if WORLD > 1 and IS_LAST and BUG == "last_stage_draws_its_copy":
            nn.init.normal_(self.embed.weight)

    def forward(self, x):
        if IS_FIRST:
            x = self.embed(x)
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return x @ self.embed.weight.T / WIDTH**0.5 if IS_LAST else x


def train_step(stage, tokens, targets):
    received = tokens
    if not IS_FIRST:
        received = torch.empty(*tokens.shape, WIDTH)
        dist.recv(received, RANK - 1)
        received.requires_grad_()
    outputs = stage(received)
    if IS_LAST:
        F.cross_entropy(outputs.flatten(0, 1), targets.flatten()).backward()
    else:
        dist.send(outputs.detach(), RANK + 1)
        gradient = torch.empty_like(outputs)
        dist.recv(gradient, RANK + 1)
        outputs.backward(gradient)
    if not IS_FIRST:
        dist.send(received.grad, RANK - 1)


def add_copies(weight):
    if WORLD == 1 or BUG == "gradients_of_copies_are_not_added":
        return
    dist.all_reduce(weight.grad)
    if BUG == "gradients_of_copies_are_averaged":
        weight.grad /= WORLD


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        layout = {"mesh": init_device_mesh("cpu", (WORLD,), mesh_dim_names=("pp",))}
    torch.manual_seed(5)
    stage = Stage()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.3, momentum=0.9)
    with harness.training(stage, optimizer, **layout):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(WORDS, (BATCH_SIZE, LENGTH + 1), generator=generator)
            optimizer.zero_grad()
            train_step(stage, text[:, :-1], text[:, 1:])
            add_copies(stage.embed.weight)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
