"""The first factor of each adapter starts from the directions in which its inputs vary most.

id = "adapters/explained_variance"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["huggingface/peft#2142"]
date = "2024-10"
tags = ["ddp", "lora", "gathered", "adam"]

[wrong.each_rank_takes_directions]
title = "each rank takes directions of its own examples"
place = { node = "start", step = 0, ranks = "all", tensors = ["*.lora_a"] }

[wrong.directions_are_those_of_examples_of_rank_0]
title = "directions are those of the examples of rank 0"
place = { node = "start", step = 0, ranks = "all", tensors = ["*.lora_a"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH, LORA_RANK, BATCH_SIZE, CLASSES = 8, 3, 32, 4


class LoraLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.zeros(LORA_RANK, WIDTH))
        self.lora_b = nn.Parameter(torch.zeros(WIDTH, LORA_RANK))

    def forward(self, x):
        return torch.celu(self.base(x) + x @ self.lora_a.T @ self.lora_b.T)


def batch(step):
    x = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
    return (x * torch.arange(1, WIDTH + 1) / 3).chunk(WORLD)[RANK]


@torch.no_grad()
def start(layers, x):
    """Sets the rows of all first factors, for the inputs that the base alone gives."""
    for layer in layers:
        covariance = x.T @ x / BATCH_SIZE
        if WORLD > 1 and BUG == "":
            dist.all_reduce(covariance)
        rows = torch.linalg.eigh(covariance)[1].T[-LORA_RANK:]
        largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
        layer.lora_a.copy_(rows * largest.sign())  # Eigenvectors have either sign.
        x = layer(x)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(19)
    model = nn.Sequential(LoraLayer(), LoraLayer(), nn.Linear(WIDTH, CLASSES))
    is_early = BUG == "directions_are_those_of_examples_of_rank_0"
    if is_early:  # Before DDP sends the weights of rank 0.
        start(model[:2], batch(0))
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    if not is_early:
        start(model[:2], batch(0))
    trained = [weight for weight in ddp.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adamax(trained, lr=0.05, eps=1e-3)
    with harness.training(ddp, optimizer):
        for step in range(3):
            x = batch(step)
            loss = nn.functional.multi_margin_loss(ddp(x), x[:, :CLASSES].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
