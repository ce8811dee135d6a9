"""Meta-learning: ranks adapt to their tasks alone, and share the gradient of the weights before.

id = "losses/tasks_of_ranks"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "learnables/learn2learn#272",
    "pytorch/pytorch#63929",
    "KanishJebaMathewM/Truxify#13118",
]
date = "2021-08"
tags = ["sgd"]

[wrong.gradients_of_tasks_are_not_averaged]
title = "gradients of the tasks are not averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.step_within_task_cuts_graph]
title = "the step within a task cuts the graph"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
TASKS, SHOTS, RATE = 4, 5, 0.3


class Learner(nn.Module):
    """Returns what the weights, adapted to each task's first examples, say of its others."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, support, targets, query):
        return torch.stack(
            [self.adapted(*task) for task in zip(support, targets, query, strict=True)]
        )

    def adapted(self, support, targets, query):
        weights = dict(self.net.named_parameters())
        loss = F.mse_loss(functional_call(self.net, weights, support), targets)
        is_cut = BUG == "step_within_task_cuts_graph"
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=not is_cut)
        pairs = zip(weights.items(), gradients, strict=True)
        weights = {name: weight - RATE * gradient for (name, weight), gradient in pairs}
        return functional_call(self.net, weights, query)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(87)
    learner = Learner()
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.2, momentum=0.9)
    with harness.training(learner, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(TASKS, 2 * SHOTS, 2, generator=generator)
            slopes = torch.randn(TASKS, 1, 2, generator=generator)
            y = torch.sin(x * slopes).sum(-1, keepdim=True)
            x, y = x.chunk(WORLD)[RANK], y.chunk(WORLD)[RANK]
            outputs = learner(x[:, :SHOTS], y[:, :SHOTS], x[:, SHOTS:])
            optimizer.zero_grad()
            F.mse_loss(outputs, y[:, SHOTS:]).backward()
            for weight in learner.parameters():
                if WORLD > 1 and BUG != "gradients_of_tasks_are_not_averaged":
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
