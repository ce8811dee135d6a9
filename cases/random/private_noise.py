"""Private training clips the gradient of each example, and adds noise to their sum once.

id = "random/private_noise"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["meta-pytorch/opacus#191", "meta-pytorch/opacus#196"]
date = "2021-06"
tags = ["sgd"]

[wrong.each_rank_adds_its_own_noise_after_sum]
title = "each rank adds its own noise after the sum"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.all_ranks_add_noise_before_sum]
title = "all ranks add the noise before the sum"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.noise_of_each_step_is_same]
title = "the noise of each step is the same"
place = { node = "random", step = 1, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, LIMIT, MULTIPLIER = 8, 0.5, 0.6


class Noise:
    """Draws the noise of a step for all weights."""

    def __init__(self):
        own = BUG == "each_rank_adds_its_own_noise_after_sum"
        self.generator = torch.Generator().manual_seed(500 + own * RANK)

    def draw(self, weights):
        if BUG == "noise_of_each_step_is_same":
            self.generator.manual_seed(500)
        sizes = [weight.shape for weight in weights]
        return [LIMIT * MULTIPLIER * torch.randn(s, generator=self.generator) for s in sizes]


def clipped_sums(model, x, y):
    """Returns the sums over examples of gradients whose norms are at most the limit."""
    weights = list(model.parameters())
    sums = [torch.zeros_like(weight) for weight in weights]
    for example, target in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(example[None]), target[None])
        grads = torch.autograd.grad(loss, weights)
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for total, grad in zip(sums, grads, strict=True):
            total += grad * (LIMIT / norm).clamp(max=1)
    return sums


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(16)
    layers = nn.Conv1d(1, 6, 4), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 6, 4)
    model, noise = nn.Sequential(*layers), Noise()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.6, momentum=0.7)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, 1, 9, generator=torch.Generator().manual_seed(step))
            y = x[:, 0, :4].argmax(1)
            weights = list(model.parameters())
            sums = clipped_sums(model, x[RANK::WORLD], y[RANK::WORLD])
            for weight, total, drawn in zip(weights, sums, noise.draw(weights), strict=True):
                is_early = BUG == "all_ranks_add_noise_before_sum"
                if is_early:
                    total += drawn
                if WORLD > 1:
                    dist.all_reduce(total)
                if not is_early:
                    total += drawn
                weight.grad = total / BATCH_SIZE
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
