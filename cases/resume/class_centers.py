"""Each rank has a part of the class centers, but not each part of their momentum is kept.

id = "resume/class_centers"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["EvolvingLMMs-Lab/OneVision-Encoder#65"]
date = "2026-01"
tags = ["gathered", "sgd"]

[wrong.momentum_of_rank_0_is_loaded_on_all_ranks]
title = "momentum of rank 0 is loaded on all ranks"
place = { node = "start", step = 2, ranks = [1], tensors = ["centers"] }

[wrong.only_rank_0_loads_momentum]
title = "only rank 0 loads momentum"
place = { node = "start", step = 2, ranks = [1], tensors = "all" }

[wrong.centers_of_rank_0_are_loaded_on_all_ranks]
title = "centers of rank 0 are loaded on all ranks"
place = { node = "start", step = 2, ranks = [1], tensors = ["centers"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, HALF, CLASSES, WIDTH = 4, 2, 12, 16


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if WORLD > 1:
            dist.all_reduce(gradient)
        return gradient


class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class FaceModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, WIDTH), nn.PReLU(), nn.Linear(WIDTH, WIDTH))
        centers = nn.functional.normalize(torch.randn(CLASSES, WIDTH), dim=1)
        self.centers = nn.Parameter(centers.chunk(WORLD)[RANK].clone())

    def forward(self, x):
        return Copy.apply(torch.tanh(self.trunk(x))) @ self.centers.T


def split_cross_entropy(logits, targets):
    own = targets - RANK * logits.shape[1]
    is_own = (own >= 0) & (own < logits.shape[1])
    picked = logits.gather(1, own.where(is_own, 0)[:, None])[:, 0] * is_own
    return (Add.apply(logits.exp().sum(1)).log() - Add.apply(picked)).mean()


def save(model, optimizer):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, f"{SAVE}.{RANK}")


def load(model, optimizer):
    first, own = (torch.load(f"{LOAD}.{rank}") for rank in (0, RANK))
    of_rank_0 = BUG == "centers_of_rank_0_are_loaded_on_all_ranks"
    model.load_state_dict(first["model"] if of_rank_0 else own["model"])
    if BUG == "only_rank_0_loads_momentum" and RANK > 0:
        return
    of_rank_0 = BUG == "momentum_of_rank_0_is_loaded_on_all_ranks"
    optimizer.load_state_dict(first["optimizer"] if of_rank_0 else own["optimizer"])


def main():
    torch.manual_seed(4)
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        dims = {"inputs": "b f", "outputs": "b c[tp]", "centers": "c[tp] d"}
        layout = {"mesh": mesh, "dims": dims}
    model = FaceModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    if LOAD:
        load(model, optimizer)
    with harness.training(model, optimizer, **layout):
        for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
            data = torch.Generator().manual_seed(step)
            x = torch.randn(8, 8, generator=data)
            y = torch.randint(CLASSES, (8,), generator=data)
            optimizer.zero_grad()
            split_cross_entropy(model(x), y).backward()
            optimizer.step()
    if SAVE:
        save(model, optimizer)
    if WORLD > 1:
        dist.destroy_process_group()


main()
