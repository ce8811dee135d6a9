"""Label smoothing of a split vocabulary averages log-probabilities over the words of one rank.

id = "parallel/finding_01_label_smoothing"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#7452", "NVIDIA/Megatron-LM#737"]
date = "2026-09"
tags = ["gathered", "embedding", "sgd"]

[wrong.mean_over_own_words]
title = "mean over the own words"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.own_number_of_words_in_coefficient]
title = "own number of words in the coefficient"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORDS, WIDTH, SMOOTHING = 16, 12, 0.3


class Enter(torch.autograd.Function):
    """Before the split head: gradients of the parts are added."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if WORLD > 1:
            dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    """Adds summands of all ranks, each of which computes the same loss with the sum."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = nn.Parameter(self.head.weight.detach().chunk(WORLD)[RANK].clone())

    def forward(self, tokens):
        return self.head(Enter.apply(torch.tanh(self.hidden(self.words(tokens)))))


def smoothed_cross_entropy(logits, targets):
    highest = logits.detach().amax(-1)
    if WORLD > 1:
        dist.all_reduce(highest, dist.ReduceOp.MAX)
    logits = logits - highest.unsqueeze(-1)
    normaliser = Sum.apply(logits.exp().sum(-1)).log()
    own = targets - RANK * logits.shape[-1]
    is_own = (own >= 0) & (own < logits.shape[-1])
    picked = logits.gather(-1, own.where(is_own, 0).unsqueeze(-1)).squeeze(-1) * is_own
    loss = normaliser - Sum.apply(picked)
    words = logits.shape[-1] if BUG == "own_number_of_words_in_coefficient" else WORDS
    if BUG == "mean_over_own_words":
        mean = logits.mean(-1)
    else:
        mean = Sum.apply(logits.sum(-1)) / WORDS
    share = SMOOTHING * words / (words - 1)
    return ((1 - share) * loss - share * (mean - normaliser)).mean()


def main():
    torch.manual_seed(0)
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        dims = {"inputs": "b s", "outputs": "b s v[tp]", "head.weight": "v[tp] d"}
        layout = {"mesh": mesh, "dims": dims}
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for _ in range(2):
            text = torch.randint(WORDS, (6, 9))
            loss = smoothed_cross_entropy(model(text[:, :-1]), text[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
