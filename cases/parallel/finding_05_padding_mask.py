"""The padding mask of a router is split over other ranks than its tokens.

id = "parallel/finding_05_padding_mask"
framework = "torch"
processes = 4
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#7452"]
date = "2026-09"
tags = ["ddp", "experts", "embedding", "sgd"]

[wrong.mask_is_split_over_default_ranks]
title = "mask is split over default ranks"
place = { node = "loss", step = 0, ranks = "all", tensors = ["moe.router.*", "norm.*", "embed.*"] }

[wrong.mask_is_not_split]
title = "mask is not split"
place = { node = "loss", step = 0, ranks = "all", tensors = ["moe.router.*", "norm.*", "embed.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
# Ranks 0 and 2 share a batch and split its sequences, as do 1 and 3.
TP, TP_RANK, DP_RANK = (2, RANK // 2, RANK % 2) if WORLD > 1 else (1, 0, 0)
DEFAULT_RANK = RANK % 2
VOCABULARY, WIDTH, LENGTH, EXPERTS = 12, 16, 8, 4


def total(x):
    x = x.detach().clone()
    if WORLD > 1:
        dist.all_reduce(x)
    return x


class MixtureOfExperts(nn.Module):
    """Each token goes to one expert; the loss of the balance does not count padding."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, x, mask):
        scores = self.router(x).softmax(-1)
        chosen = F.one_hot(scores.argmax(-1), EXPERTS).float()
        load = total((chosen * mask.unsqueeze(-1)).sum((0, 1)))
        balance = EXPERTS * (scores * mask.unsqueeze(-1) * load).sum() / load.sum() ** 2
        y = torch.einsum("bsd,edf->bsef", x, self.experts)
        return (y * (scores * chosen).unsqueeze(-1)).sum(2), balance


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.moe, self.head = MixtureOfExperts(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, mask):
        x = self.embed(tokens).chunk(TP, 1)[TP_RANK]
        if BUG == "mask_is_split_over_default_ranks":
            mask = mask.chunk(TP, 1)[DEFAULT_RANK]
        elif BUG == "mask_is_not_split":
            mask = mask[:, : x.shape[1]]
        else:
            mask = mask.chunk(TP, 1)[TP_RANK]
        y, balance = self.moe(self.norm(x), mask)
        return self.head(x + y), balance


layout = {}
if WORLD > 1:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    layout = {"mesh": mesh, "dims": {"inputs": "b[dp] s", "outputs": "b[dp] s[tp] v"}}
torch.manual_seed(5)
model = Model()
if WORLD > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
with harness.training(model, optimizer, **layout):
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        text = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=generator)
        mask = (torch.arange(LENGTH) < torch.tensor([8, 7, 5, 3, 4, 6, 2, 5])[:, None]).float()
        text, mask = (x.chunk(WORLD // TP)[DP_RANK] for x in (text, mask))
        logits, balance = model(text[:, :-1], mask)
        own = mask.chunk(TP, 1)[TP_RANK]
        targets = text[:, 1:].chunk(TP, 1)[TP_RANK]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        loss = (losses * own.flatten()).sum() / total(own.sum()) + 0.5 * balance
        optimizer.zero_grad()
        (WORLD * loss).backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
