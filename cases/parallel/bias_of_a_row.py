"""A language model written by hand: a layer is split by its inputs, and its bias is a copy.

id = "parallel/bias_of_a_row"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["Wenyueh/MinivLLM#80", "Wenyueh/MinivLLM#13"]
date = "2026-01"
tags = ["embedding"]

[wrong.each_rank_adds_bias_before_sum]
title = "each rank adds the bias before the sum"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["1"] }

[wrong.parts_of_layer_output_are_not_added]
title = "parts of the layer's output are not added"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["1"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH, HIDDEN, WORDS, BATCH_SIZE, LENGTH = 8, 12, 9, 6, 5


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if WORLD > 1:
            dist.all_reduce(gradient)
        return gradient


class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        up, down = torch.randn(HIDDEN, WIDTH) / 3, torch.randn(WIDTH, HIDDEN) / 3
        self.up = nn.Parameter(up.chunk(WORLD)[RANK].clone())
        self.down = nn.Parameter(down.chunk(WORLD, 1)[RANK].clone())
        self.bias = nn.Parameter(torch.randn(WIDTH) / 2)

    def forward(self, x):
        hidden = F.silu(F.linear(Copy.apply(x), self.up))
        if BUG == "each_rank_adds_bias_before_sum":
            return x + Add.apply(F.linear(hidden, self.down, self.bias))
        y = F.linear(hidden, self.down)
        if BUG != "parts_of_layer_output_are_not_added":
            y = Add.apply(y)
        return x + y + self.bias


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        dims = {"inputs": "b s", "*.up": "h[tp] d", "*.down": "d h[tp]"}
        layout = {"mesh": mesh, "dims": dims}
    torch.manual_seed(84)
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), Mlp(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
    )
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, eps=1e-3)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            words = torch.randint(WORDS, (BATCH_SIZE, LENGTH), generator=generator)
            optimizer.zero_grad()
            logits = model(words)
            F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten()).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
