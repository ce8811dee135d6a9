"""Attention replaces the caller's group of context parallelism by the one it was built with.

id = "parallel/finding_13_build_time_group"
framework = "torch"
processes = 4
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#7452"]
date = "2026-09"
tags = ["ddp", "gathered", "embedding", "sgd"]

[wrong.group_is_replaced_after_first_batch]
title = "group is replaced after the first batch"
place = { node = "outputs", step = 1, ranks = "all", tensors = ["attention"] }

[wrong.group_of_constructor_is_used]
title = "group of the constructor is used"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["attention"] }
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
# Ranks 0 and 2 share sequences, as do 1 and 3.
CP, CP_RANK, DP_RANK = (2, RANK // 2, RANK % 2) if WORLD > 1 else (1, 0, 0)
VOCABULARY, WIDTH, LENGTH = 12, 16, 6


class Gather(torch.autograd.Function):
    """Gathers along the sequence; the gradient of a part is the sum of those of all ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(CP)]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(CP, 1)[dist.get_rank(ctx.group)], None


class Attention(nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.built_with = groups.get("cp")

    def forward(self, x, groups):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if WORLD > 1:
            is_old = BUG == "group_of_constructor_is_used"
            group = self.built_with if is_old else groups["cp"]
            k, v = (Gather.apply(z.contiguous(), group) for z in (k, v))
            if BUG == "group_is_replaced_after_first_batch":
                groups["cp"] = self.built_with
        return F.scaled_dot_product_attention(q, k, v)


class Encoder(nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention, self.head = Attention(groups), nn.Linear(WIDTH, VOCABULARY)
        self.groups = groups

    def forward(self, tokens, places):
        x = self.tokens(tokens) + self.places(places)
        return self.head(x + self.attention(x, self.groups))


layout, groups = {}, {}
if WORLD > 1:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
    layout = {"mesh": mesh, "dims": "b[dp] s[cp]"}
    groups["cp"] = [dist.new_group([0, 1]), dist.new_group([2, 3])][RANK // 2]
torch.manual_seed(15)
model = encoder = Encoder(groups)
if WORLD > 1:
    encoder.groups = {"cp": mesh["cp"].get_group()}
    model = DistributedDataParallel(encoder)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
with harness.training(model, optimizer, **layout):
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        text = torch.randint(VOCABULARY, (4, LENGTH), generator=generator)
        places = torch.arange(LENGTH).expand(4, -1)
        batch = [x.chunk(WORLD // CP)[DP_RANK] for x in (text, places, text.flip(1))]
        tokens, places, targets = (x.chunk(CP, 1)[CP_RANK].contiguous() for x in batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens, places).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
