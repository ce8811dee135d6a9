"""Biases of experts move by counts of tokens, which need all digits also where weights have few.

id = "precision/counts_of_experts"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#7081"]
date = "2026-09"
tags = ["experts", "sgd"]

[right.counts_are_floats]
title = "counts are floats of 32 bits"
patch = [["bincount(minlength=EXPERTS)", "bincount(minlength=EXPERTS).float()"]]

[wrong.counts_have_few_digits]
title = "counts have few digits"
place = { node = "update", step = 0, ranks = "all", tensors = ["bias"] }

[wrong.bias_has_few_digits]
title = "the bias has few digits"
place = { node = "update", step = 0, ranks = "all", tensors = ["bias"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
TOKENS, SIZE, EXPERTS, SPEED = 2400, 5, 4, 0.3


class Layer(nn.Module):
    """Each token takes the expert of the best score; a bias that is not learnt evens out loads."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(SIZE, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, SIZE, SIZE) / 3)
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x):
        scores = torch.sigmoid(self.router(x))
        chosen = (scores + self.bias).argmax(1)
        self.chosen = chosen
        outputs = torch.einsum("ti,eio->teo", x, self.experts)
        rows = torch.arange(len(x))
        return outputs[rows, chosen] * scores[rows, chosen, None]

    @torch.no_grad()
    def even_out(self):
        counts = self.chosen.bincount(minlength=EXPERTS)
        if BUG == "counts_have_few_digits":
            counts = counts.bfloat16()
        if WORLD > 1:
            dist.all_reduce(counts)
        counts = counts.float()
        self.bias += SPEED * (1 - counts / counts.mean())
        if BUG == "bias_has_few_digits":
            self.bias.copy_(self.bias.bfloat16())


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(220)
    model = Layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(TOKENS, SIZE, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.mse_loss(model(x), x.roll(1, 1)).backward()
            average([weight.grad for weight in model.parameters()])
            optimizer.step()
            model.even_out()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
