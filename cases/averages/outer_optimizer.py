"""DiLoCo: an outer step with the mean of the ranks' changes; here after each inner step.

id = "averages/outer_optimizer"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["meta-pytorch/torchft#233", "pytorch/torchtitan#1507", "arXiv:2311.08105"]
date = "2025-07"
tags = ["sgd"]
note = "After one inner step of SGD, the mean of the changes is that of the whole batch."

[wrong.change_has_wrong_sign]
title = "the change has the wrong sign"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.changes_are_added_not_averaged]
title = "changes are added, not averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.each_rank_takes_its_own_change]
title = "each rank takes its own change"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class DiLoCo:
    def __init__(self, model):
        self.weights = list(model.parameters())
        self.inner = torch.optim.SGD(self.weights, lr=0.2)
        self.outer = torch.optim.SGD(self.weights, lr=0.7, momentum=0.9, nesterov=True)
        self.shared = [w.detach().clone() for w in self.weights]

    def outer_step(self):
        for weight, shared in zip(self.weights, self.shared, strict=True):
            change = shared - weight.detach()
            if BUG == "change_has_wrong_sign":
                change = -change
            if WORLD > 1 and BUG != "each_rank_takes_its_own_change":
                dist.all_reduce(change)
                if BUG != "changes_are_added_not_averaged":
                    change /= WORLD
            weight.data.copy_(shared)
            weight.grad = change
        self.outer.step()
        for weight, shared in zip(self.weights, self.shared, strict=True):
            shared.copy_(weight.detach())


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    trainer = DiLoCo(model)
    with harness.training(model, trainer.outer):
        for _ in range(2):
            x = torch.randn(24, 6)
            y = x[:, :3].argmax(-1)
            trainer.inner.zero_grad()
            F.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD]).backward()
            trainer.inner.step()
            trainer.outer_step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
