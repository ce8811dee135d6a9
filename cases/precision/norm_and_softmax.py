"""The norm, or the softmax of the attention, computes in bfloat16 instead of float32.

id = "precision/norm_and_softmax"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "huggingface/transformers#33133",
    "pytorch/pytorch#91498",
    "vllm-project/speculators#668",
]
date = "2024-08"
tags = ["ddp", "low_precision", "embedding", "sgd"]

[wrong.variance_is_computed_in_bfloat16]
title = "the variance is computed in bfloat16"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["norms.*"] }

[wrong.softmax_is_computed_in_bfloat16]
title = "the softmax is computed in bfloat16"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["attention"] }

[wrong.norm_weight_is_kept_in_bfloat16]
title = "the norm's weight is kept in bfloat16"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["norms.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH, HEADS, TOKENS = 16, 2, 6


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(WIDTH))

    def forward(self, x):
        dtype = torch.float32
        if BUG == "variance_is_computed_in_bfloat16":
            dtype = torch.bfloat16
        variance = x.to(dtype).square().mean(-1, keepdim=True)
        weight = self.weight
        if BUG == "norm_weight_is_kept_in_bfloat16":
            weight = weight.bfloat16()
        return x * torch.rsqrt(variance + 1e-6) * weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-1, -2)
        if BUG == "softmax_is_computed_in_bfloat16":
            scores = scores.bfloat16()
        return self.out((scores.softmax(-1).float() @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, WIDTH)
        self.norms = nn.ModuleList(RMSNorm() for _ in range(3))
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
        self.head = nn.Linear(WIDTH, 13)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.head(self.norms[2](x))


torch.manual_seed(0)
model = Model()
if WORLD > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with harness.training(model, optimizer):
    for step in range(2):
        tokens = torch.randint(13, (8, TOKENS + 1), generator=torch.Generator().manual_seed(step))
        tokens = tokens[RANK::WORLD]
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
