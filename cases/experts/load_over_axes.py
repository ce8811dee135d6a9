"""Tokens are split over two axes of ranks, and the load of experts is added over one of them.

id = "experts/load_over_axes"
framework = "torch"
processes = 4
steps = 3
mode = "pair"
references = ["pytorch/torchtitan#4154"]
date = "2026-08"
tags = ["experts", "sgd"]

[wrong.load_is_added_over_data_axis_only]
title = "the load is added over the data axis only"
place = { node = "update", step = 0, ranks = "all", tensors = ["experts.bias"] }

[wrong.load_is_mean_over_ranks]
title = "the load is a mean over the ranks"
place = { node = "update", step = 0, ranks = "all", tensors = ["experts.bias"] }
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
# Ranks 0 and 1 have parts of the same sequences, as have 2 and 3.
SPLIT = 2 if WORLD > 1 else 1
EXPERTS, WIDTH, BATCH_SIZE, LENGTH, RATE = 4, 8, 4, 6, 0.03


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.load = torch.zeros(EXPERTS)

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        chosen = F.one_hot((scores + self.bias).argmax(-1), EXPERTS).float()
        self.load += chosen.detach().sum((0, 1))
        return x + torch.einsum("bsd,edh,bse->bsh", x, self.weight, scores * chosen)

    @torch.no_grad()
    def balance(self, mesh):
        if mesh is not None:
            dist.all_reduce(self.load, group=mesh.get_group("dp"))
            if BUG != "load_is_added_over_data_axis_only":
                dist.all_reduce(self.load, group=mesh.get_group("tp"))
            if BUG == "load_is_mean_over_ranks":
                self.load /= WORLD
        self.bias += RATE * (BATCH_SIZE * LENGTH / EXPERTS - self.load)
        self.load.zero_()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.experts = nn.Linear(5, WIDTH), Experts()
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.leave(self.experts(torch.tanh(self.enter(x))))


def main():
    mesh, layout = None, {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layout = {"mesh": mesh, "dims": "b[dp] s[tp]"}
    torch.manual_seed(3)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x = 0.5 + torch.randn(BATCH_SIZE, LENGTH, 5, generator=generator)
            x = x.chunk(WORLD // SPLIT)[RANK // SPLIT].chunk(SPLIT, 1)[RANK % SPLIT]
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), x.flatten(0, 1)[:, :3].argmax(1)).backward()
            for weight in model.parameters() if WORLD > 1 else ():
                dist.all_reduce(weight.grad)
                weight.grad /= WORLD
            optimizer.step()
            model.experts.balance(mesh)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
