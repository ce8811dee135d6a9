"""An adapter of a fused projection: its rows are cut, or read, in another order than the base's.

id = "adapters/packed_qkv"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["OpenPipe/ART#619"]
date = "2026-03"
tags = ["lora", "embedding", "adam"]

[wrong.rows_of_b_are_cut_as_one_matrix]
title = "rows of B are cut as one matrix"
place = { node = "start", step = 0, ranks = "all", tensors = ["*.lora_b"] }

[wrong.b_outputs_are_read_head_by_head]
title = "B's outputs are read head by head"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["first", "second"] }

[wrong.gradients_of_a_are_not_summed]
title = "gradients of A are not summed"
place = { node = "sum", step = 0, ranks = "all", tensors = ["*.lora_a"] }
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
WORDS, WIDTH, HEADS, LORA_RANK = 12, 16, 4, 3


class SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if WORLD > 1:
            dist.all_reduce(gradient)
        return gradient


class SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def of_own_heads(weight):
    """Takes the own rows of the queries, of the keys and of the values."""
    return torch.cat([block.chunk(WORLD)[RANK] for block in weight.chunk(3)]).clone()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        qkv, out = torch.randn(3 * WIDTH, WIDTH) / 4, torch.randn(WIDTH, WIDTH) / 4
        b = torch.randn(3 * WIDTH, LORA_RANK) / 3
        self.qkv = nn.Parameter(of_own_heads(qkv), requires_grad=False)
        self.out = nn.Parameter(out.chunk(WORLD, 1)[RANK].clone(), requires_grad=False)
        self.lora_a = nn.Parameter(torch.randn(LORA_RANK, WIDTH) / 4)
        if BUG == "rows_of_b_are_cut_as_one_matrix":
            self.lora_b = nn.Parameter(b.chunk(WORLD)[RANK].clone())
        else:
            self.lora_b = nn.Parameter(of_own_heads(b))

    def forward(self, x):
        x = SumOfGradients.apply(x)
        change = x @ self.lora_a.T @ self.lora_b.T
        if BUG == "b_outputs_are_read_head_by_head":
            change = change.unflatten(-1, (HEADS // WORLD, 3, -1)).transpose(2, 3).flatten(2)
        qkv = (x @ self.qkv.T + change).unflatten(-1, (3, HEADS // WORLD, -1))
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return SumOfParts.apply(y.transpose(1, 2).flatten(2) @ self.out.T)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.first, self.second = Attention(), Attention()
        self.head = nn.Linear(WIDTH, WORDS).requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.first(F.rms_norm(x, (WIDTH,)))
        return self.head(x + self.second(F.rms_norm(x, (WIDTH,))))


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        dims = {"*.qkv": "3*o[tp] i", "*.lora_b": "3*o[tp] r", "*.out": "o i[tp]"}
        layout = {"mesh": mesh, "dims": {"inputs": "b s", **dims}}
    torch.manual_seed(2)
    model = Model()
    adapters = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(adapters, lr=0.02, eps=1e-4)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(WORDS, (6, 8), generator=generator)
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            for name, weight in model.named_parameters():
                if WORLD > 1 and name.endswith("lora_a") and BUG != "gradients_of_a_are_not_summed":
                    dist.all_reduce(weight.grad)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
