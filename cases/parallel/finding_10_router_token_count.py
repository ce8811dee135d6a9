"""An all-reduce in place overwrites the local count of tokens that scales the router's loss.

id = "parallel/finding_10_router_token_count"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#7452", "NVIDIA/Megatron-LM#7481"]
date = "2026-09"
tags = ["experts", "embedding", "sgd"]

[wrong.local_count_is_overwritten]
title = "local count is overwritten"
place = { node = "loss", step = 0, ranks = "all", tensors = ["router.*", "embed.*"] }

[wrong.load_of_own_tokens]
title = "load of the own tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = ["router.*", "embed.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCABULARY, WIDTH, EXPERTS, LENGTH = 14, 16, 4, 6


def add(x):
    if WORLD > 1:
        dist.all_reduce(x)
    return x


class Router(nn.Module):
    """Returns scores, choices and the loss of the balance times the number of own tokens."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 2)

    def forward(self, x, mask):
        scores = F.linear(x, self.weight).softmax(-1)
        chosen = F.one_hot(scores.argmax(-1), EXPERTS) * mask.unsqueeze(-1)
        own_count = mask.sum()
        count = add(own_count if BUG == "local_count_is_overwritten" else own_count.clone())
        load = chosen.sum((0, 1)).float()
        share = load / mask.sum() if BUG == "load_of_own_tokens" else add(load) / count
        mean = (scores * mask.unsqueeze(-1)).sum((0, 1)) / mask.sum()
        return scores * chosen, EXPERTS * (share * mean).sum() * own_count


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.router = nn.Embedding(VOCABULARY, WIDTH), Router()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, mask):
        x = self.embed(tokens)
        scores, balance = self.router(x, mask)
        y = torch.stack([torch.tanh(expert(x)) for expert in self.experts], -1)
        return self.head(x + (y @ scores.unsqueeze(-1)).squeeze(-1)), balance


layout = {}
if WORLD > 1:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
    layout = {"mesh": mesh, "dims": "b s[cp]"}
torch.manual_seed(12)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
with harness.training(model, optimizer, **layout):
    for step in range(2):
        generator = torch.Generator().manual_seed(20 + step)
        text = torch.randint(VOCABULARY, (5, LENGTH + 1), generator=generator)
        mask = (torch.arange(LENGTH) < torch.tensor([6, 5, 4, 6, 2]).unsqueeze(1)).long()
        parts = (text[:, :-1], text[:, 1:], mask)
        tokens, targets, mask = (x.chunk(WORLD, 1)[RANK] for x in parts)
        logits, balance = model(tokens, mask)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        optimizer.zero_grad()
        ((losses * mask.flatten()).sum() + 0.5 * balance).backward()
        count = add(mask.sum())
        for p in model.parameters():
            p.grad = add(p.grad) / count
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
