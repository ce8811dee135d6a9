"""The balance of experts is the product of their shares of tokens and of their scores.

id = "experts/constant_balance"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["mindspore-ai/hyper-parallel#752"]
date = "2026-09"
tags = ["experts", "sgd"]

[wrong.scores_are_averaged_by_rank_of_choice]
title = "scores are averaged by rank of choice"
place = { node = "loss", step = 0, ranks = "all", tensors = ["router.*"] }

[wrong.shares_are_those_of_own_tokens]
title = "shares are those of the own tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = ["router.*"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
TOKENS, WIDTH, EXPERTS, CHOSEN, WEIGHT = 24, 8, 4, 2, 0.5


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 2)

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        top, numbers = scores.topk(CHOSEN)
        gates = torch.zeros_like(scores).scatter(1, numbers, top)
        return x + torch.einsum("td,edh,te->th", x, self.up, gates).tanh(), gates


def balance(gates):
    """Returns the loss of the own tokens, given the shares of all."""
    shares = (gates > 0).float().mean(0) / CHOSEN
    if WORLD > 1 and BUG != "shares_are_those_of_own_tokens":
        dist.all_reduce(shares)
        shares /= WORLD
    if BUG == "scores_are_averaged_by_rank_of_choice":
        return EXPERTS * (shares[:, None] * gates.topk(CHOSEN).values.mean(0)).sum()
    return EXPERTS * (shares * gates.mean(0)).sum()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(98)
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))
            x = (x + torch.linspace(-1, 1, TOKENS)[:, None]).chunk(WORLD)[RANK]
            outputs, gates = model(x)
            optimizer.zero_grad()
            (F.mse_loss(outputs, x.flip(1)) + WEIGHT * balance(gates)).backward()
            for weight in model.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
