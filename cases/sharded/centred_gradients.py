"""Gradients are centred over the inputs of a neuron, which a layer that is split by rows shares.

id = "sharded/centred_gradients"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
tags = ["tensor", "sgd"]

[wrong.rank_centres_by_its_own_inputs]
title = "a rank centres by its own inputs"
place = { node = "clipping", step = 0, ranks = "all", tensors = ["down"] }

[wrong.gradients_are_centred_over_outputs]
title = "gradients are centred over the outputs"
place = { node = "clipping", step = 0, ranks = "all", tensors = ["up", "down"] }
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
BATCH_SIZE, SIZE, HIDDEN = 12, 5, 16


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Mlp(nn.Module):
    """Weights have a row for each output; `down` has a part of the inputs on each rank."""

    def __init__(self):
        super().__init__()
        up, down = torch.randn(HIDDEN, SIZE) / 2, torch.randn(3, HIDDEN) / 3
        self.up = nn.Parameter(up.chunk(WORLD)[RANK].clone())
        self.down = nn.Parameter(down.chunk(WORLD, 1)[RANK].clone())

    def forward(self, x):
        y = F.softplus(x @ self.up.T) @ self.down.T
        return Sum.apply(y) if WORLD > 1 else y


@torch.no_grad()
def centre(model):
    if BUG == "gradients_are_centred_over_outputs":
        for weight in model.parameters():
            weight.grad -= weight.grad.mean(0)
        return
    up, down = model.up.grad, model.down.grad
    up -= up.mean(1, keepdim=True)
    means = down.mean(1, keepdim=True)
    if WORLD > 1 and BUG != "rank_centres_by_its_own_inputs":
        dist.all_reduce(means)
        means /= WORLD
    down -= means


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        parts = {"up": "h[tp] d", "down": "d h[tp]"}
        layout = {"mesh": mesh, "dims": {"inputs": "b d", "outputs": "b d", **parts}}
    torch.manual_seed(206)
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, SIZE, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            centre(model)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
