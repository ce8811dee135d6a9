"""Query heads are split over ranks, and all use one head of keys and values that each rank has.

id = "parallel/one_key_head"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["bigcode-project/Megatron-LM#37"]
date = "2023-03"
tags = ["embedding", "sgd"]

[wrong.gradients_of_keys_and_values_are_not_summed]
title = "gradients of keys and values are not summed"
place = { node = "gradient", step = 0, ranks = "all", tensors = [
    "attention.key_value.weight",
    "norm.*",
    "embed.*",
] }

[wrong.they_are_averaged]
title = "they are averaged"
place = { node = "gradient", step = 0, ranks = "all", tensors = [
    "attention.key_value.weight",
    "norm.*",
    "embed.*",
] }

[wrong.rank_1_starts_from_other_keys_and_values]
title = "rank 1 starts from other keys and values"
place = { node = "start", step = 0, ranks = [1], tensors = ["attention.key_value.weight"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORDS, WIDTH, HEADS, HEAD_SIZE = 11, 12, 4, 4


class Enter(torch.autograd.Function):
    """Before parts that ranks compute: their gradients are added."""

    @staticmethod
    def forward(ctx, x, divisor):
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if WORLD > 1:
            dist.all_reduce(gradient)
        return gradient / ctx.divisor, None


class Leave(torch.autograd.Function):
    """Adds the parts of all ranks, each of which computes with the sum."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def own_part(weight, dim):
    return nn.Parameter(weight.detach().chunk(WORLD, dim)[RANK].clone())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * HEAD_SIZE, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * HEAD_SIZE, bias=False)
        self.out = nn.Linear(HEADS * HEAD_SIZE, WIDTH, bias=False)
        self.query.weight = own_part(self.query.weight, 0)
        self.out.weight = own_part(self.out.weight, 1)
        if BUG == "rank_1_starts_from_other_keys_and_values" and RANK == 1:
            nn.init.normal_(
                self.key_value.weight, std=0.3, generator=torch.Generator().manual_seed(9)
            )

    def forward(self, x):
        queries = self.query(Enter.apply(x, 1)).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
        both = self.key_value(x)
        if BUG != "gradients_of_keys_and_values_are_not_summed":
            both = Enter.apply(both, WORLD if BUG == "they_are_averaged" else 1)
        keys, values = both.unsqueeze(1).expand(-1, queries.shape[1], -1, -1).chunk(2, -1)
        y = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return Leave.apply(self.out(y.transpose(1, 2).flatten(2)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.head = Attention(), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.attention(self.norm(x)))


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        dims = {"attention.query.weight": "h[tp] d", "attention.out.weight": "d h[tp]"}
        layout = {"mesh": mesh, "dims": {"inputs": "b s", "outputs": "b s v", **dims}}
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(WORDS, (8, 9), generator=generator)
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
