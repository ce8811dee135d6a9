"""Some weights are sharded, the others are copies, which the norm for clipping counts once.

id = "sharded/copies_in_the_norm"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#88955"]
date = "2022-11"
tags = ["fsdp2", "sgd"]

[wrong.copies_count_once_for_each_rank]
title = "copies count once for each rank"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, LARGEST = 16, 0.2


def square_of(grads):
    return sum((grad.square().sum() for grad in grads), torch.zeros(()))


@torch.no_grad()
def clip(weights):
    sharded = [w.grad.to_local() for w in weights if isinstance(w.grad, DTensor)]
    copies = [w.grad for w in weights if not isinstance(w.grad, DTensor)]
    square = square_of(sharded)
    if BUG == "copies_count_once_for_each_rank":
        square += square_of(copies)
        dist.all_reduce(square)
    else:
        if WORLD > 1:
            dist.all_reduce(square)
        square += square_of(copies)
    for grad in sharded + copies:
        grad.mul_((LARGEST / (square.sqrt() + 1e-6)).clamp(max=1))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(83)
    model = nn.Sequential(
        nn.Linear(7, 20), nn.SiLU(), nn.Linear(20, 20), nn.SiLU(), nn.Linear(20, 3)
    )
    if WORLD > 1:
        mesh = init_device_mesh("cpu", (WORLD,))
        fully_shard(model[2], mesh=mesh)
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.5, momentum=0.8, nesterov=True)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, 7, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.mse_loss(model(x), x[:, :3] * x[:, 3:6]).backward()
            for weight in weights:
                if WORLD > 1 and not isinstance(weight.grad, DTensor):
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            clip(weights)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
