"""A checkpoint numbers layers within a stage: with more stages, all load the first layers.

id = "parallel/finding_12_checkpoint_of_stages"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#7452"]
date = "2026-09"
tags = ["pipeline", "sgd"]

[wrong.weights_of_first_stage]
title = "weights of the first stage"
place = { node = "start", step = 0, ranks = [1], tensors = ["layers.2.*", "layers.3.*"] }

[wrong.momentum_of_first_stage]
title = "momentum of the first stage"
place = { node = "start", step = 0, ranks = [1], tensors = ["layers.2.*", "layers.3.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH, LAYERS = 10, 4
OWN_LAYERS = range(RANK * LAYERS // WORLD, (RANK + 1) * LAYERS // WORLD)


class Stage(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(WIDTH, WIDTH) for i in layers})

    def forward(self, x):
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return x


def get_batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, WIDTH, generator=generator)
    return x, x.roll(1, 1) * x.mean(1, keepdim=True)


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_without_stages():
    """Returns weights and momentum of each layer after an earlier training on one device."""
    torch.manual_seed(14)
    model = Stage(range(LAYERS))
    optimizer = make_optimizer(model)
    for step in range(2):
        x, y = get_batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    layers = model.layers.values()
    momentum = [
        [optimizer.state[p]["momentum_buffer"] for p in each.parameters()] for each in layers
    ]
    return [each.state_dict() for each in layers], momentum


def restore(model, optimizer):
    weights, momentum = train_without_stages()
    for local, number in enumerate(OWN_LAYERS):
        layer = model.layers[str(number)]
        layer.load_state_dict(weights[local if BUG == "weights_of_first_stage" else number])
        saved = momentum[local if BUG == "momentum_of_first_stage" else number]
        for p, value in zip(layer.parameters(), saved, strict=True):
            optimizer.state[p]["momentum_buffer"] = value.clone()


def train_step(model, step):
    """The first stage sends its outputs; the last computes the loss and sends their gradient."""
    x, y = get_batch(step)
    if WORLD == 1:
        F.mse_loss(model(x), y).backward()
    elif RANK == 0:
        outputs = model(x)
        dist.send(outputs.detach(), 1)
        gradient = torch.empty_like(outputs)
        dist.recv(gradient, 1)
        outputs.backward(gradient)
    else:
        received = torch.empty_like(x)
        dist.recv(received, 0)
        received.requires_grad_()
        F.mse_loss(model(received), y).backward()
        dist.send(received.grad, 0)


layout = {}
if WORLD > 1:
    dist.init_process_group("gloo")
    layout = {"mesh": init_device_mesh("cpu", (WORLD,), mesh_dim_names=("pp",))}
model = Stage(OWN_LAYERS)
optimizer = make_optimizer(model)
restore(model, optimizer)
with harness.training(model, optimizer, **layout):
    for step in (2, 3):
        optimizer.zero_grad()
        train_step(model, step)
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
