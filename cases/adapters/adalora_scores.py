"""AdaLoRA prunes singular values by moving scores, and holds its factors orthogonal.

id = "adapters/adalora_scores"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["huggingface/peft#432", "QingruZhang/AdaLoRA#22"]
date = "2023-05"
tags = ["lora", "sgd"]

[wrong.orthogonal_penalty_is_missing]
title = "the orthogonal penalty is missing"
place = { node = "loss", step = 0, ranks = "all", tensors = ["*.p", "*.q"] }

[wrong.scores_follow_own_gradients]
title = "scores follow the own gradients"
place = { node = "update", step = 0, ranks = "all", tensors = ["*.scores"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
LORA_RANK, KEPT, DECAY, PENALTY = 6, 4, 0.7, 0.2


class SingularValues(nn.Module):
    """A frozen layer with a change P diag(values) Q."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.p = nn.Parameter(torch.randn(outputs, LORA_RANK) / outputs**0.5)
        self.q = nn.Parameter(torch.randn(LORA_RANK, inputs) / inputs**0.5)
        self.values = nn.Parameter(0.5 * torch.randn(LORA_RANK))
        self.register_buffer("scores", torch.zeros(LORA_RANK))

    def forward(self, x):
        return self.base(x) + x @ self.q.T * self.values @ self.p.T

    def penalty(self):
        identity = torch.eye(LORA_RANK)
        return sum((m - identity).square().sum() for m in (self.p.T @ self.p, self.q @ self.q.T))

    @torch.no_grad()
    def score(self):
        new = (self.values * self.values.grad).abs()
        self.scores.mul_(DECAY).add_(new, alpha=1 - DECAY)

    @torch.no_grad()
    def prune(self):
        lowest = self.scores.argsort()[: LORA_RANK - KEPT]
        self.values[lowest] = 0.0


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(13)
    layers = SingularValues(10, 16), SingularValues(16, 12)
    model = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.Linear(12, 5).requires_grad_(False))
    adapters = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(adapters, lr=0.1, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(3):
            x = torch.randn(24, 10, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            loss = F.cross_entropy(model(x), x[:, :5].argmax(1), label_smoothing=0.1)
            if BUG != "orthogonal_penalty_is_missing":
                loss = loss + PENALTY * sum(layer.penalty() for layer in layers)
            optimizer.zero_grad()
            loss.backward()
            if BUG == "scores_follow_own_gradients":
                for layer in layers:
                    layer.score()
            for weight in adapters:
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            if BUG != "scores_follow_own_gradients":
                for layer in layers:
                    layer.score()
            optimizer.step()
            for layer in layers:
                layer.prune()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
