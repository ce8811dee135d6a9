"""The projections of cross-attention are built for other ranks than the rest of the layer.

id = "parallel/finding_06_cross_attention_group"
framework = "torch"
processes = 4
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#7452"]
date = "2026-09"
tags = ["embedding", "sgd"]

[wrong.gradients_are_added_over_default_ranks]
title = "gradients are added over default ranks"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["encode.*", "embed.*"] }

[wrong.heads_of_default_ranks]
title = "heads of default ranks"
place = { node = "start", step = 0, ranks = [1, 2], tensors = [
    "attention.query.weight",
    "attention.key.weight",
    "attention.value.weight",
] }
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
TP = 2 if WORLD > 1 else 1
WIDTH, HEADS, VOCABULARY = 16, 4, 10


def add(x, group):
    x = x.clone(memory_format=torch.contiguous_format)
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return add(gradient, ctx.group), None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return add(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Column(nn.Module):
    """A layer whose outputs are split: `place` is a group and the rank in it."""

    def __init__(self, place):
        super().__init__()
        self.group, rank = place
        weight = torch.randn(WIDTH, WIDTH) / 4
        self.weight = nn.Parameter(weight.chunk(TP)[rank].clone())

    def forward(self, x):
        heads = F.linear(Enter.apply(x, self.group), self.weight)
        return heads.unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)


class CrossAttention(nn.Module):
    def __init__(self, own, default):
        super().__init__()
        group, rank = own
        if BUG == "gradients_are_added_over_default_ranks":
            own = default[0], rank
        elif BUG == "heads_of_default_ranks":
            own = group, default[1]
        self.query, self.key, self.value = Column(own), Column(own), Column(own)
        self.group, weight = group, torch.randn(WIDTH, WIDTH) / 4
        self.project = nn.Parameter(weight.chunk(TP, 1)[rank].clone())

    def forward(self, x, memory):
        y = F.scaled_dot_product_attention(self.query(x), self.key(memory), self.value(memory))
        return Leave.apply(F.linear(y.transpose(1, 2).flatten(2), self.project), self.group)


class Decoder(nn.Module):
    def __init__(self, own, default):
        super().__init__()
        self.encode, self.embed = nn.Linear(6, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.attention, self.head = CrossAttention(own, default), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, features):
        x = self.embed(tokens)
        return self.head(x + self.attention(x, torch.tanh(self.encode(features))))


def main():
    own, default, layout, dp, dp_rank = (None, 0), (None, 0), {}, None, 0
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
        own, dp = (mesh["tp"].get_group(), mesh["tp"].get_local_rank()), mesh["dp"].get_group()
        dp_rank = mesh["dp"].get_local_rank()
        default = [dist.new_group([0, 1]), dist.new_group([2, 3])][RANK // 2], RANK % 2
        columns = {f"attention.{name}.weight": "o[tp] i" for name in ("query", "key", "value")}
        dims = {"inputs": "b[dp] s", "attention.project": "o i[tp]", **columns}
        layout = {"mesh": mesh, "dims": dims}
    torch.manual_seed(6)
    model = Decoder(own, default)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.8)
    data = torch.Generator().manual_seed(7)
    with harness.training(model, optimizer, **layout):
        for _ in range(2):
            text = torch.randint(VOCABULARY, (8, 6), generator=data)
            features = torch.randn(8, 5, 6, generator=data)
            text, features = (x.chunk(WORLD // TP)[dp_rank] for x in (text, features))
            logits = model(text[:, :-1], features)
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
            if WORLD > 1:
                for p in model.parameters():
                    p.grad = add(p.grad, dp) / 2
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
