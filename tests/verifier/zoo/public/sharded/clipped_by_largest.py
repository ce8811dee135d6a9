"""Gradients of shards are clipped by the largest element of all, no root and no sum of norms.

reference = "meta-pytorch/torchrec#3199, tenstorrent/tt-metal#55587"
date = "2025-07"
framework = "torch"

[wrong]
"the root of the norm's order makes it one" = ["other_clipping"]
"the largest element is that of a shard" = ["clipped_by_local_norm", "other_clipping"]
"largest elements are added over the ranks" = ["clipped_by_local_norm", "other_clipping"]
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lockstep

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORDS, WIDTH, LIMIT, ORDER = 18, 8, 0.01, float("inf")


def local(gradient):
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


@torch.no_grad()
def clip(weights):
    norms = [torch.linalg.vector_norm(local(weight.grad), ORDER) for weight in weights]
    total = torch.stack(norms).max()
    if WORLD > 1 and BUG == "largest elements are added over the ranks":
        dist.all_reduce(total)
    elif WORLD > 1 and BUG != "the largest element is that of a shard":
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
    if BUG == "the root of the norm's order makes it one":
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
    with lockstep.record(model, optimizer):
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
