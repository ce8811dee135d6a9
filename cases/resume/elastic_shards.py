"""Files of a sharded optimizer are merged in the order of their names, as text.

id = "resume/elastic_shards"
framework = "torch"
processes = 2
save_processes = 3
steps = 4
mode = "resume"
references = [
    "deepspeedai/DeepSpeed#5342",
    "deepspeedai/DeepSpeed#5283",
    "deepspeedai/DeepSpeed#5105",
]
date = "2024-04"
tags = ["fsdp2", "sgd"]

[wrong.files_are_sorted_as_text]
title = "files are sorted as text"
place = { node = "start", step = 2, ranks = "all", tensors = "all" }

[wrong.padding_is_not_removed]
title = "padding is not removed"
place = { node = "start", step = 2, ranks = "all", tensors = "all" }
"""

import glob
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, HALF, BATCH, ALIGNMENT = 4, 2, 12, 4
FIRST = 8  # Ranks below have files of another model.


def save(model, optimizer):
    """Whole weights in one file; of momentum, each rank's rows, padded to the alignment."""
    weights = {}
    rows, sizes = {}, {}
    for name, weight in model.named_parameters():
        momentum = optimizer.state[weight]["momentum_buffer"]
        if isinstance(weight, DTensor):
            weight, momentum = weight.full_tensor(), momentum.to_local()
        weights[name], sizes[name] = weight.detach(), len(momentum)
        padding = torch.zeros(-len(momentum) % ALIGNMENT, *momentum.shape[1:])
        rows[name] = torch.cat([momentum, padding])
    torch.save({"rows": rows, "sizes": sizes}, f"{SAVE}_rank_{FIRST + RANK}.optimizer")
    if RANK == 0:
        torch.save(weights, SAVE + ".weights")


def load(model, optimizer):
    def rank_of(path):
        return int(path.rsplit("_", 1)[1].split(".")[0])

    key = None if BUG == "files_are_sorted_as_text" else rank_of
    paths = sorted(glob.glob(LOAD + "_rank_*.optimizer"), key=key)
    files, weights = [torch.load(path) for path in paths], torch.load(LOAD + ".weights")
    for name, weight in model.named_parameters():
        parts = []
        for file in files:
            rows = file["rows"][name]
            is_cut = BUG != "padding_is_not_removed"
            parts.append(rows[: file["sizes"][name]] if is_cut else rows)
        whole, momentum = weights[name], torch.cat(parts)[: len(weights[name])].contiguous()
        if isinstance(weight, DTensor):
            place = (weight.device_mesh, weight.placements)
            whole, momentum = distribute_tensor(whole, *place), distribute_tensor(momentum, *place)
        weight.data.copy_(whole)
        optimizer.state[weight]["momentum_buffer"] = momentum


torch.manual_seed(17)
model = nn.Sequential(nn.Linear(7, 14), nn.Softplus(), nn.Linear(14, 5, bias=False))
if WORLD > 1:
    dist.init_process_group("gloo")
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
if LOAD:
    load(model, optimizer)
with harness.training(model, optimizer):
    for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
        x = torch.randn(BATCH, 7, generator=torch.Generator().manual_seed(step))
        own = x[RANK::WORLD]
        optimizer.zero_grad()
        F.mse_loss(model(own), own[:, 1:6] * own[:, :5]).backward()
        optimizer.step()
if SAVE:
    save(model, optimizer)
if WORLD > 1:
    dist.destroy_process_group()
