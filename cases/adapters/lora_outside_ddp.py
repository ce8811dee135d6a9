"""The LoRA network replaces forward methods, so that DDP never sees its forward pass.

id = "adapters/lora_outside_ddp"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["kohya-ss/sd-scripts#924", "kohya-ss/sd-scripts#989", "huggingface/diffusers#4046"]
date = "2023-11"
tags = ["lora", "sgd"]

[wrong.adapters_are_not_synchronised]
title = "the adapters are not synchronised"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.gradients_are_reduced_by_sums]
title = "gradients are reduced by sums"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.only_a_matrices_are_reduced]
title = "only the A matrices are reduced"
place = { node = "sum", step = 0, ranks = "all", tensors = ["network.*.up.weight"] }
"""

import math
import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class LoraAdapter(nn.Module):
    """Adds a product of two thin matrices to the outputs of a layer."""

    def __init__(self, layer, rank=4, alpha=8):
        super().__init__()
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.normal_(self.up.weight, std=0.1)
        self.scale = alpha / rank

    def attach(self, layer):
        original = layer.forward
        layer.forward = lambda x: original(x) + self.up(self.down(x)) * self.scale


class Denoiser(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.middle = nn.Linear(width, width)
        self.leave = nn.Linear(width, 8)
        self.requires_grad_(False)
        layers = (self.enter, self.middle, self.leave)
        self.network = nn.ModuleList(LoraAdapter(layer) for layer in layers)
        for adapter, layer in zip(self.network, layers, strict=True):
            adapter.attach(layer)

    def forward(self, x):
        return self.leave(torch.sin(self.middle(torch.sin(self.enter(x)))))


def reduce_gradients(network):
    if BUG == "adapters_are_not_synchronised":
        return
    for name, p in network.named_parameters():
        if BUG == "only_a_matrices_are_reduced" and "up" in name:
            continue
        dist.all_reduce(p.grad)
        if BUG != "gradients_are_reduced_by_sums":
            p.grad /= WORLD


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Denoiser()
    optimizer = torch.optim.SGD(model.network.parameters(), lr=0.2, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            clean, noise = torch.randn(2, 16, 8, generator=generator)
            noisy = (clean + noise)[RANK::WORLD]
            loss = (model(noisy) - noise[RANK::WORLD]).square().mean()
            loss.backward()
            if WORLD > 1:
                reduce_gradients(model.network)
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
