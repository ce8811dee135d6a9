"""Angles of rotary positions are computed in 16 bits, with errors that grow with the place.

id = "precision/rotary_angles"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "EleutherAI/gpt-neox#1003",
    "huggingface/transformers#29496",
    "Modalities/modalities#462",
]
date = "2023-07"
tags = ["ddp", "low_precision", "embedding", "sgd"]

[wrong.frequencies_are_rounded_to_bfloat16]
title = "frequencies are rounded to bfloat16"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["1.rotary", "2.rotary"] }

[wrong.places_are_rounded_to_bfloat16]
title = "places are rounded to bfloat16"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["1.rotary", "2.rotary"] }

[wrong.second_layer_computes_its_angles_in_bfloat16]
title = "the second layer computes its angles in bfloat16"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["2.rotary"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORDS, WIDTH, LENGTH, STRIDE = 10, 12, 8, 2301


class Rotary(nn.Module):
    def __init__(self, in_16_bits):
        super().__init__()
        self.frequencies = 10.0 ** (-torch.arange(WIDTH // 2) / 2)
        if BUG == "frequencies_are_rounded_to_bfloat16" or in_16_bits:
            self.frequencies = self.frequencies.bfloat16()
        self.in_16_bits = in_16_bits or BUG == "places_are_rounded_to_bfloat16"

    def forward(self, x):
        places = STRIDE * torch.arange(LENGTH, dtype=torch.float32)  # Some of a long sequence.
        if self.in_16_bits:
            places = places.bfloat16()
        angles = (places[:, None] * self.frequencies).float()
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Layer(nn.Module):
    def __init__(self, in_16_bits=False):
        super().__init__()
        self.qkv, self.rotary = nn.Linear(WIDTH, 3 * WIDTH), Rotary(in_16_bits)

    def forward(self, x):
        queries, keys, values = self.qkv(x).chunk(3, -1)
        queries, keys = self.rotary(queries), self.rotary(keys)
        return x + F.scaled_dot_product_attention(queries, keys, values, is_causal=True)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    second = Layer(BUG == "second_layer_computes_its_angles_in_bfloat16")
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Layer(), second, nn.Linear(WIDTH, WORDS))
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.9)
    with harness.training(wrapped, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(WORDS, (8, LENGTH + 1), generator=generator)[RANK::WORLD]
            optimizer.zero_grad()
            F.cross_entropy(wrapped(text[:, :-1]).transpose(1, 2), text[:, 1:]).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
