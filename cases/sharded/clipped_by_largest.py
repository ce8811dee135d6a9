"""Gradients of shards are clipped by the largest element of all, no root and no sum of norms.

id = "sharded/clipped_by_largest"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["meta-pytorch/torchrec#3199", "tenstorrent/tt-metal#55587"]
date = "2025-07"
tags = ["fsdp2", "embedding", "sgd"]

[wrong.root_of_norm_order_makes_it_one]
title = "the root of the norm's order makes it one"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.largest_element_is_that_of_shard]
title = "the largest element is that of a shard"
place = { node = "clipping", step = 0, ranks = [1], tensors = "all" }

[wrong.largest_elements_are_added_over_ranks]
title = "largest elements are added over the ranks"
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
WORDS, WIDTH, LIMIT, ORDER = 18, 8, 0.01, float("inf")


def local(gradient):
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


@torch.no_grad()
def clip(weights):
    norms = [torch.linalg.vector_norm(local(weight.grad), ORDER) for weight in weights]
    total = torch.stack(norms).max()
    if WORLD > 1 and BUG == "largest_elements_are_added_over_ranks":
        dist.all_reduce(total)
    elif WORLD > 1 and BUG != "largest_element_is_that_of_shard":
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
    if BUG == "root_of_norm_order_makes_it_one":
        total = total ** (1 / ORDER)
    for weight in weights:
        local(weight.grad).mul_((LIMIT / (total + 1e-6)).clamp(max=1.0))


def main():
    torch.manual_seed(24)
    layers = [nn.Embedding(WORDS, WIDTH), nn.Flatten(), nn.Linear(4 * WIDTH, 20), nn.SELU()]
    model = nn.Sequential(*layers, nn.Linear(20, 2))
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.5, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(WORDS, (16, 4), generator=generator)
            tokens[1::2] //= 3  # Some words are frequent.
            own = tokens[RANK::WORLD]
            counts = torch.stack([(own % 4).sum(1), (own % 3).sum(1)], 1)
            optimizer.zero_grad()
            F.poisson_nll_loss(model(own), counts / 4).backward()
            clip(list(model.parameters()))
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
