"""Weights are flattened and sharded, and then all look like vectors, which do not decay.

reference = "mlfoundations/open_clip#358, pytorch/pytorch#101343"
date = "2023-02"
framework = "torch"

[wrong]
"flat weights count as vectors" = ["other_weight_decay"]
"biases and norms decay, too" = ["other_weight_decay"]
"each shard has the mask of the first" = ["other_weight_decay"]
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import lockstep

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
        if BUG == "flat weights count as vectors":
            weight = weight.flatten()
        return float(weight.dim() > 1 or BUG == "biases and norms decay, too")

    def flatten(self, arrays):
        flat = torch.cat([array.detach().flatten() for array in arrays])
        return F.pad(flat, (0, -len(flat) % WORLD))

    def own_shard(self, flat, is_mask=False):
        place = 0 if is_mask and BUG == "each shard has the mask of the first" else RANK
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
    with lockstep.record(model, optimizer):
        for step in range(2):
            x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))[RANK::WORLD]
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, 2:5].argmax(1)).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
