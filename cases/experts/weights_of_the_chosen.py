"""A token's experts are weighted by scores among them; the scores of others would take a share.

id = "experts/weights_of_the_chosen"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/torchtitan#2258"]
date = "2026-01"
tags = ["experts", "sgd"]

[wrong.scores_are_among_all_experts]
title = "scores are among all experts"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["1"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
TOKENS, WIDTH, EXPERTS = 24, 8, 4


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 2)

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        top, numbers = scores.topk(2)
        if BUG != "scores_are_among_all_experts":
            top = top / top.sum(-1, keepdim=True)
        gates = torch.zeros_like(scores).scatter(1, numbers, top)
        return x + torch.einsum("td,edh,te->th", x, self.up, gates).tanh()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(101)
    model = nn.Sequential(nn.Linear(6, WIDTH), Experts(), nn.Linear(WIDTH, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(TOKENS, 6, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x[:, :3] * x[:, 3:]).argmax(1)).backward()
            for weight in model.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
