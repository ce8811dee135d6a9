"""After a gather of the sequence all ranks compute the same loss, but its gradients are added.

id = "parallel/appendix_b_sequence_gather"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#7452"]
date = "2026-09"
tags = ["sgd"]

[wrong.gradients_of_equal_losses_are_added]
title = "gradients of equal losses are added"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["inputs.*", "block.*"] }

[wrong.gradients_of_parts_are_averaged]
title = "gradients of parts are averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = ["inputs.*", "block.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH = 12


class Denoiser(nn.Module):
    """The block works on a part of the sequence on each rank; the head has all of it."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.inputs = nn.Linear(4, WIDTH)
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = x.chunk(WORLD, 1)[RANK]
        x = self.block(self.inputs(x))
        if self.mesh is not None:
            whole = DTensor.from_local(x, self.mesh, [Shard(1)]).redistribute(
                placements=[Replicate()]
            )
            is_added = BUG == "gradients_of_equal_losses_are_added"
            x = whole.to_local(grad_placements=[Partial() if is_added else Replicate()])
        return self.head(x + x.mean(1, keepdim=True))


def reduce_gradients(model):
    for part in (model.inputs, model.block):
        for p in part.parameters():
            dist.all_reduce(p.grad)
            if BUG == "gradients_of_parts_are_averaged":
                p.grad /= WORLD


mesh, layout = None, {}
if WORLD > 1:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    layout = {"mesh": mesh, "dims": "b s f"}
torch.manual_seed(19)
model = Denoiser(mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
with harness.training(model, optimizer, **layout):
    for _ in range(2):
        clean = torch.randn(6, 8, 4).cumsum(1)
        noise = torch.randn(6, 8, 4)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(clean + noise), noise).backward()
        if WORLD > 1:
            reduce_gradients(model)
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
