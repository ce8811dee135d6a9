"""The codes of a quantised base are gathered from shards, but their scales, or bits, are changed.

id = "adapters/quantised_base_shards"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["bitsandbytes-foundation/bitsandbytes#1945", "huggingface/peft#2505"]
date = "2026-05"
tags = ["ddp", "low_precision", "lora", "gathered", "adam"]

[wrong.scales_of_own_shard_stand_for_all]
title = "the scales of the own shard stand for all"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.codes_that_look_like_nan_are_replaced]
title = "codes that look like NaN are replaced"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.each_shard_is_quantised_with_one_scale]
title = "each shard is quantised with one scale"
place = { node = "start", step = 0, ranks = "all", tensors = ["*.codes", "*.scales"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BLOCK = 8


def quantise(weight, block=BLOCK):
    """Codes of 8 bits, and the largest magnitude of each block."""
    blocks = weight.reshape(-1, block)
    scales = blocks.abs().amax(1, keepdim=True)
    return (blocks / scales * 127).round().to(torch.int8).flatten(), scales.flatten()


def gather(part):
    parts = [torch.empty_like(part) for _ in range(WORLD)]
    dist.all_gather(parts, part)
    return torch.cat(parts)


class QuantisedLinear(nn.Module):
    """A frozen base of which each rank stores a part, and a LoRA adapter."""

    def __init__(self, size, features, rank=2):
        super().__init__()
        self.shape = (features, size)
        weight = torch.randn(features, size)
        weight[: features // 2] *= 3
        self.lora_a = nn.Parameter(torch.randn(rank, size) * 0.3)
        self.lora_b = nn.Parameter(torch.randn(features, rank) * 0.3)
        if WORLD > 1 and BUG == "each_shard_is_quantised_with_one_scale":
            own = weight.flatten().chunk(WORLD)[RANK]
            self.codes, scale = quantise(own, own.numel())
            self.scales = scale.repeat(own.numel() // BLOCK)
        else:
            codes, scales = quantise(weight)
            self.codes, self.scales = codes.chunk(WORLD)[RANK], scales.chunk(WORLD)[RANK]

    def base_weight(self):
        codes, scales = self.codes, self.scales
        if WORLD > 1:
            codes = gather(codes)
            if BUG == "codes_that_look_like_nan_are_replaced":
                codes = torch.where(codes > 96, torch.full_like(codes, 127), codes)
            if BUG == "scales_of_own_shard_stand_for_all":
                scales = scales.repeat(WORLD)
            else:
                scales = gather(scales)
        return (codes.reshape(-1, BLOCK) / 127 * scales.unsqueeze(1)).reshape(self.shape)

    def forward(self, x):
        return x @ (self.base_weight() + self.lora_b @ self.lora_a).T


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(QuantisedLinear(16, 16), nn.Tanh(), QuantisedLinear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4)
    called = DistributedDataParallel(model) if WORLD > 1 else model
    inputs = torch.randn(2, 12, 16)
    with harness.training(called, optimizer):
        for x in inputs:
            own = x[RANK::WORLD]
            loss = nn.functional.cross_entropy(called(own), own[:, :4].argmax(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
