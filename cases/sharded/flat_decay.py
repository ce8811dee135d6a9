"""Weights are flattened and sharded, and then all look like vectors, which do not decay.

id = "sharded/flat_decay"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["mlfoundations/open_clip#358", "pytorch/pytorch#101343"]
date = "2023-02"
tags = ["gathered"]

[wrong.flat_weights_count_as_vectors]
title = "flat weights count as vectors"
place = { node = "update", step = 0, ranks = "all", tensors = ["0.weight", "3.weight", "5.weight"] }

[wrong.biases_and_norms_decay_too]
title = "biases and norms decay, too"
place = { node = "update", step = 0, ranks = "all", tensors = [
    "0.bias",
    "1.weight",
    "3.bias",
    "4.weight",
    "5.bias",
] }

[wrong.each_shard_has_mask_of_first]
title = "each shard has the mask of the first"
place = { node = "update", step = 0, ranks = [1], tensors = ["3.weight", "5.bias"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class FlatSgdW(torch.optim.Optimizer):
    """Each rank updates its shard of all weights in a row."""

    def __init__(self, params, lr=0.2, weight_decay=0.3):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.weights = self.param_groups[0]["params"]
        decays = [torch.full_like(weight, self.decays(weight)) for weight in self.weights]
        self.mask = self.own_shard(self.flatten(decays), is_mask=True)

    def decays(self, weight):
        if BUG == "flat_weights_count_as_vectors":
            weight = weight.flatten()
        return float(weight.dim() > 1 or BUG == "biases_and_norms_decay_too")

    def flatten(self, arrays):
        flat = torch.cat([array.detach().flatten() for array in arrays])
        return F.pad(flat, (0, -len(flat) % WORLD))

    def own_shard(self, flat, is_mask=False):
        place = 0 if is_mask and BUG == "each_shard_has_mask_of_first" else RANK
        return flat.chunk(WORLD)[place]

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        gradient = self.flatten([weight.grad for weight in self.weights])
        if WORLD > 1:
            dist.all_reduce(gradient)
            gradient /= WORLD
        shard = self.own_shard(self.flatten(self.weights))
        shard = shard * (1 - group["lr"] * group["weight_decay"] * self.mask)
        shard -= group["lr"] * self.own_shard(gradient)
        parts = [shard]
        if WORLD > 1:
            parts = [torch.empty_like(shard) for _ in range(WORLD)]
            dist.all_gather(parts, shard)
        sizes = [weight.numel() for weight in self.weights]
        whole = torch.cat(parts)[: sum(sizes)].split(sizes)
        for weight, part in zip(self.weights, whole, strict=True):
            weight.copy_(part.view_as(weight))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(13)
    layers = [nn.Linear(7, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 12), nn.LayerNorm(12)]
    model = nn.Sequential(*layers, nn.Linear(12, 3))
    optimizer = FlatSgdW(model.parameters())
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))[RANK::WORLD]
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, 2:5].argmax(1)).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
