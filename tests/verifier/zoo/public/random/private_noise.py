"""Private training clips the gradient of each example, and adds noise to their sum once.

reference = "meta-pytorch/opacus#191, meta-pytorch/opacus#196"
date = "2021-06"
framework = "torch"

[wrong]
"each rank adds its own noise after the sum" = ["diverged_replicas", "unequal_sums"]
"all ranks add the noise before the sum" = ["repeated_gradient"]
"the noise of each step is the same" = ["random_numbers_repeated"]
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import lockstep

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, LIMIT, MULTIPLIER = 8, 0.5, 0.6


class Noise:
    """Draws the noise of a step for all weights."""

    def __init__(self):
        own = BUG == "each rank adds its own noise after the sum"
        self.generator = torch.Generator().manual_seed(500 + own * RANK)

    def draw(self, weights):
        if BUG == "the noise of each step is the same":
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
    with lockstep.record(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, 1, 9, generator=torch.Generator().manual_seed(step))
            y = x[:, 0, :4].argmax(1)
            weights = list(model.parameters())
            sums = clipped_sums(model, x[RANK::WORLD], y[RANK::WORLD])
            for weight, total, drawn in zip(weights, sums, noise.draw(weights), strict=True):
                is_early = BUG == "all ranks add the noise before the sum"
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
