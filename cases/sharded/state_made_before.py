"""Adagrad has its state before the weights are sharded, and the shards need their parts of it.

id = "sharded/state_made_before"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["hpcaitech/ColossalAI#6433", "hpcaitech/ColossalAI#6396"]
date = "2026-07"
tags = ["fsdp2", "accumulation"]

[wrong.accumulators_of_shards_start_from_zeros]
title = "accumulators of shards start from zeros"
place = { node = "start", step = 0, ranks = "all", tensors = "all" }

[wrong.each_shard_has_first_rows_of_accumulator]
title = "each shard has the first rows of the accumulator"
place = { node = "start", step = 0, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def pretrain(model, optimizer):
    """Fills the accumulators, as a training before did."""
    generator = torch.Generator().manual_seed(31)
    for weight in model.parameters():
        optimizer.state[weight]["sum"].add_(torch.rand(weight.shape, generator=generator) / 5)


def part_of(whole, weight):
    if BUG == "accumulators_of_shards_start_from_zeros":
        whole = torch.zeros_like(whole)
    elif BUG == "each_shard_has_first_rows_of_accumulator":
        rows = len(weight.to_local())
        first = whole[:rows].repeat(WORLD, *[1] * (whole.ndim - 1))
        whole = first[: len(whole)].contiguous()
    return distribute_tensor(whole, weight.device_mesh, weight.placements)


def shard(model, optimizer):
    old = list(model.parameters())
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    new = list(model.parameters())
    for before, after in zip(old, new, strict=True):
        state = optimizer.state.pop(before)
        assert isinstance(after, DTensor)
        state["sum"] = part_of(state["sum"], after)
        optimizer.state[after] = state
    optimizer.param_groups[0]["params"] = new


def main():
    torch.manual_seed(23)
    model = nn.Sequential(nn.Linear(9, 16), nn.Softplus(), nn.Linear(16, 12), nn.Softplus())
    model.append(nn.Linear(12, 6))
    optimizer = torch.optim.Adagrad(
        model.parameters(), lr=0.1, initial_accumulator_value=0.05, foreach=False
    )
    pretrain(model, optimizer)
    if WORLD > 1:
        dist.init_process_group("gloo")
        shard(model, optimizer)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(20, 9, generator=torch.Generator().manual_seed(step))
            x = x[RANK::WORLD]
            optimizer.zero_grad()
            F.multilabel_soft_margin_loss(model(x), (x[:, :6] > 0.3).float()).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
