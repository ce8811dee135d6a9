"""A router's loss for each sequence enters the backward pass of each micro-batch.

id = "experts/loss_of_micro_batches"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA-NeMo/Automodel#3359", "NVIDIA-NeMo/Automodel#1412"]
date = "2026-02"
tags = ["fsdp2", "accumulation", "experts", "embedding", "adam"]

[wrong.it_is_not_divided_by_micro_batches]
title = "it is not divided by the micro-batches"
place = { node = "gradient", step = 0, ranks = "all", tensors = [
    "0.weight",
    "1.*",
    "2.router.weight",
] }

[wrong.it_is_divided_by_ranks_too]
title = "it is divided by the ranks, too"
place = { node = "gradient", step = 0, ranks = "all", tensors = [
    "0.weight",
    "1.*",
    "2.router.weight",
] }

[wrong.its_gradient_is_lost]
title = "its gradient is lost"
place = { node = "gradient", step = 0, ranks = "all", tensors = [
    "0.weight",
    "1.*",
    "2.router.weight",
] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORDS, WIDTH, EXPERTS, LENGTH, BATCH_SIZE, MICRO_BATCHES = 12, 10, 4, 9, 8, 2


class AddGradient(torch.autograd.Function):
    """Returns scores, and gives a loss a gradient of its own in the backward pass."""

    scale = 1.0

    @staticmethod
    def forward(ctx, scores, loss):
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.tensor(AddGradient.scale)


def balance(scores, chosen):
    """Returns the mean over sequences of how unevenly each loads the experts."""
    load = chosen.mean(1) * EXPERTS / 2
    return (load * scores.mean(1)).sum(-1).mean()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Linear(WIDTH, EXPERTS * WIDTH)

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        chosen = F.one_hot(scores.topk(2, -1).indices, EXPERTS).sum(-2).float()
        if BUG == "its_gradient_is_lost":
            AddGradient.apply(scores, balance(scores, chosen))
        else:
            scores = AddGradient.apply(scores, balance(scores, chosen))
        y = torch.tanh(self.experts(x)).unflatten(-1, (EXPERTS, WIDTH))
        return x + (y * (scores * chosen).unsqueeze(-1)).sum(-2)


def main():
    torch.manual_seed(16)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Experts(), Experts(), nn.Linear(WIDTH, WORDS))
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in (model[1], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    AddGradient.scale = 0.5 / MICRO_BATCHES
    if BUG == "it_is_not_divided_by_micro_batches":
        AddGradient.scale = 0.5
    elif BUG == "it_is_divided_by_ranks_too":
        AddGradient.scale = 0.5 / MICRO_BATCHES / WORLD
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3, weight_decay=0.1)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(WORDS, (BATCH_SIZE, LENGTH + 1), generator=generator)
            optimizer.zero_grad()
            for micro_batch in text.chunk(MICRO_BATCHES):
                own = micro_batch.chunk(WORLD)[RANK]
                logits = model(own[:, :-1]).flatten(0, 1)
                loss = F.cross_entropy(logits, own[:, 1:].flatten()) / MICRO_BATCHES
                loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
