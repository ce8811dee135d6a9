"""Trains with weights that the script changes after the update, in one process or under gloo.

`clamp` clips them, `average` averages them over the processes in place of the gradients, `hook`
normalises their rows in a hook of the optimizer, `checkpoint` computes the forward pass again in
the backward pass, and `sparse` has an embedding whose rows occur several times. `wrong` is the same
on rank 0 alone, or with another number. `fsdp` and `tensor` split the weights over the processes.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lockstep import record_torch

KIND, IS_WRONG = sys.argv[1], "wrong" in sys.argv
rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
IS_WRONG = IS_WRONG and world_size > 1
torch.manual_seed(0)
x, y = torch.randn(3, 12, 8), torch.randn(3, 12, 4)
ids = torch.randint(6, (3, 12, 5))
if KIND == "sparse":
    model = nn.Sequential(nn.EmbeddingBag(10, 8, sparse=True), nn.Linear(8, 4))
else:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
weights, called = [*model.parameters()], model
if world_size > 1:
    dist.init_process_group("gloo")
    if "fsdp" in sys.argv:
        fully_shard(model)
    elif "tensor" in sys.argv:
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
    elif KIND != "average":
        called = DistributedDataParallel(model)
    weights = [*model.parameters()]
if KIND == "hook":
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@torch.no_grad()
def normalise(*_):
    for weight in weights[::2]:
        weight.div_(weight.norm(dim=1, keepdim=True) * (2 if IS_WRONG else 1))


@torch.no_grad()
def change():
    """What the script does after the update."""
    if KIND == "clamp" and not (IS_WRONG and rank):
        for weight in weights:
            weight.clamp_(-0.2, 0.2)
    if KIND == "average" and world_size > 1:
        for weight in weights[: 3 if IS_WRONG else 4]:
            dist.all_reduce(weight)
            weight.div_(world_size)


if KIND == "hook":
    optimizer.register_step_post_hook(normalise)
path, replay = ("two.npz", "one.npz") if world_size > 1 else ("one.npz", None)
own = slice(rank * 12 // world_size, (rank + 1) * 12 // world_size)
own = slice(12) if "tensor" in sys.argv else own
with record_torch.record(path, called, optimizer, steps=3, replay=replay):
    for step in range(3):
        given = (ids if KIND == "sparse" else x)[step, own]
        optimizer.zero_grad()
        if KIND == "checkpoint" and world_size > 1:
            output = checkpoint(called, given, use_reentrant=False)
        else:
            output = called(given)
        loss = (output - y[step, own]).square().mean() * (1.5 if IS_WRONG and rank else 1)
        if KIND in ("clamp", "average", "hook"):
            loss = (output - y[step, own]).square().mean()
        loss.backward()
        optimizer.step()
        change()
if world_size > 1:
    dist.barrier()
    os._exit(0)  # Destroying the group aborts now and then, in a thread of gloo.
