"""Inputs of the key encoder are shuffled over ranks, and all of its keys must be put back.

id = "gathered/dense_keys"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["CoinCheung/DenseCL#1", "facebookresearch/moco#20"]
date = "2021-02"
tags = ["ddp", "gathered", "sgd"]

[wrong.dense_keys_are_not_put_back]
title = "dense keys are not put back"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.keys_are_put_back_by_wrong_permutation]
title = "keys are put back by the wrong permutation"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os
from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, CHANNELS, TEMPERATURE, DECAY = 12, 8, 0.2, 0.9


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv1d(3, 12, 3, stride=2), nn.GroupNorm(3, 12), nn.ReLU())
        self.whole, self.dense = nn.Linear(12, CHANNELS), nn.Conv1d(12, CHANNELS, 1)

    def forward(self, x):
        x = self.backbone(x)
        whole = F.normalize(self.whole(x.mean(2)), dim=1)
        return torch.cat([whole.unsqueeze(2), F.normalize(self.dense(x), dim=1)], 2)


def gather(x):
    if WORLD == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


@torch.no_grad()
def keys_of(encoder, images, order):
    """Encodes images of all ranks in a random order; returns the keys of all in their own."""
    shuffled = gather(images)[order].chunk(WORLD)[RANK]
    keys = gather(encoder(shuffled))
    back = order if BUG == "keys_are_put_back_by_wrong_permutation" else order.argsort()
    dense = keys if BUG == "dense_keys_are_not_put_back" else keys[back]
    return keys[back][..., 0], dense[..., 1:]


def contrast(queries, keys, places):
    return F.cross_entropy(queries @ keys.T / TEMPERATURE, places)


def main():
    torch.manual_seed(17)
    queries = Encoder()
    keys = deepcopy(queries).requires_grad_(False)
    if WORLD > 1:
        dist.init_process_group("gloo")
    model = DistributedDataParallel(queries) if WORLD > 1 else queries
    optimizer = torch.optim.SGD(queries.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-3)
    own = torch.arange(BATCH_SIZE).chunk(WORLD)[RANK]
    with harness.training(model, optimizer, others={"keys": keys}):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            images = torch.randn(BATCH_SIZE, 3, 11, generator=generator)
            other = images + 0.4 * torch.randn(BATCH_SIZE, 3, 11, generator=generator)
            order = torch.randperm(BATCH_SIZE, generator=generator)
            q = model(images[own])
            whole, dense = keys_of(keys, other[own], order)
            loss = contrast(q[..., 0], whole, own)
            for place in range(dense.shape[2]):
                loss = loss + contrast(q[..., 1 + place], dense[..., place], own) / dense.shape[2]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mean, weight in zip(keys.parameters(), queries.parameters(), strict=True):
                    mean.lerp_(weight, 1 - DECAY)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
