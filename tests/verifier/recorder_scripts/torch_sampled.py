"""Trains a small model, recorded with samples: FILE [plain|fsdp|large] [BUG] [REPLAY]."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lockstep import record_torch

LATER = 11  # A row of the embedding of which the samples have no element.


def main(path, kind="plain", bug="", replay=None):
    torch.manual_seed(1 if bug == "other_start" else 0)
    size = 2_200_000 if kind == "large" else 60
    model = nn.Sequential(
        nn.Embedding(size, 8), nn.Flatten(), nn.Linear(32, 41), nn.Tanh(), nn.Linear(41, 5)
    )
    embedding, rank, number = model[0], 0, int(os.environ.get("WORLD_SIZE", "1"))
    if number > 1:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    if kind == "fsdp":
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randint(0, 40, (64, 4), generator=generator), torch.arange(64) % 5
    given = {"sample": None if kind == "large" else 16, "start": bug == "start", "replay": replay}
    with record_torch.record(path, model, optimizer, **given):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.chunk(number)[rank]), y.chunk(number)[rank])
        loss.backward()
        if bug == "row":
            later_row(embedding.weight.grad, rank).mul_(1.01)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if bug == "row_later":
            with torch.no_grad():
                later_row(embedding.weight, rank).add_(1e-3)
    if number > 1:
        dist.barrier()
        os._exit(0)


def later_row(tensor, rank):
    """Returns the row, which rank 0 has, or nothing of it."""
    own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own[LATER : LATER + (rank == 0)]


if __name__ == "__main__":
    main(*sys.argv[1:])
