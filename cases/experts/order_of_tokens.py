"""Tokens come back from their experts and are put in a wrong place.

id = "experts/order_of_tokens"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/torchtitan#1340", "pytorch/torchtitan#1237"]
date = "2025-06"
tags = ["experts"]

[wrong.sorted_in_place_of_unsorted]
title = "sorted in place of unsorted"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["moe"] }

[wrong.scores_are_those_of_unsorted_tokens]
title = "scores are those of unsorted tokens"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["moe"] }

[wrong.received_tokens_are_not_grouped_by_expert]
title = "received tokens are not grouped by expert"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["moe"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_to_all_single

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXPERTS, WIDTH, TOP = 4, 8, 2
LOCAL = EXPERTS // WORLD


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        own = slice(RANK * LOCAL, (RANK + 1) * LOCAL)
        self.w_in = nn.Parameter((torch.randn(EXPERTS, WIDTH, 12) / 3)[own].clone())
        self.w_out = nn.Parameter((torch.randn(EXPERTS, 12, WIDTH) / 3)[own].clone())

    def experts(self, x, expert):
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=LOCAL).tolist()
        if BUG == "received_tokens_are_not_grouped_by_expert":
            order = torch.arange(len(x))
        parts = zip(x[order].split(counts), self.w_in, self.w_out, strict=True)
        y = torch.cat([(part @ a).tanh() @ b for part, a, b in parts])
        return y[order.argsort()]

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).topk(TOP, -1)
        order = chosen.flatten().argsort(stable=True)
        expert, token = chosen.flatten()[order], order // TOP
        if WORLD == 1:
            y = self.experts(x[token], expert)
        else:
            counts = expert.bincount(minlength=EXPERTS)
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts)
            sent, taken = (c.view(WORLD, -1).sum(1).tolist() for c in (counts, theirs))
            x = all_to_all_single(x.new_empty(sum(taken), WIDTH), x[token], taken, sent)
            y = self.experts(x, torch.arange(LOCAL).repeat(WORLD).repeat_interleave(theirs))
            y = all_to_all_single(y.new_empty(len(token), WIDTH), y, sent, taken)
        if BUG == "scores_are_those_of_unsorted_tokens":
            y = (y * scores.flatten()[:, None])[order.argsort()]
        elif BUG == "sorted_in_place_of_unsorted":
            y = y[order] * scores.flatten()[:, None]
        else:
            y = y[order.argsort()] * scores.flatten()[:, None]
        return y.view(-1, TOP, WIDTH).sum(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.moe, self.head = nn.LayerNorm(WIDTH), Moe(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(x + self.moe(self.norm(x)))


torch.manual_seed(0)
layout = {}
if WORLD > 1:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
    layout = {"mesh": mesh, "dims": {"inputs": "b[ep] d", "moe.w_*": "e[ep] i o"}}
model = Net()
torch.manual_seed(1)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
with harness.training(model, optimizer, **layout):
    for _ in range(2):
        x = torch.randn(20, WIDTH)
        y = (x[:, :1] * x[:, 1:2])[RANK::WORLD]
        F.mse_loss(model(x[RANK::WORLD]), y).div(WORLD).backward()
        for name, weight in model.named_parameters():
            if WORLD > 1 and "moe.w_" not in name:
                dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
if WORLD > 1:
    dist.destroy_process_group()
