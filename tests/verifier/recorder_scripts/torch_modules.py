"""Trains small networks with modules recorded, some of them with one broken module.

Does the trainings of `jobs.json` in this folder that are of so many processes: a list of objects
with the arguments of `train` and `size`, the number of processes, which is 2 by default.
"""

import contextlib
import json
import os
import pathlib

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep import record_torch


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        shape = *x.shape[:2], self.heads, -1
        q, k, v = (w(x).view(shape).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class LanguageModel(nn.Module):
    def __init__(self, depth=2, width=32, heads=4, words=50, length=16):
        super().__init__()
        self.embedding, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x):
        x = self.embedding(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv_1, self.norm_1 = nn.Conv2d(channels, channels, 3, 1, 1), nn.GroupNorm(2, channels)
        self.conv_2, self.norm_2 = nn.Conv2d(channels, channels, 3, 1, 1), nn.GroupNorm(2, channels)

    def forward(self, x):
        y = F.relu(self.norm_1(self.conv_1(x)), inplace=True)
        return F.relu(x + self.norm_2(self.conv_2(y)))


class ResNet(nn.Module):
    def __init__(self, depth=2, channels=8):
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, 1, 1)
        self.layers = nn.Sequential(*(Residual(channels) for _ in range(depth)))
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


def batch_of(network, step, rank, size):
    generator = torch.Generator().manual_seed(step)
    if network == "gpt":
        x = torch.randint(50, (8, 17), generator=generator)
        x, y = x[:, :-1], x[:, 1:]
    else:
        x = torch.randn(8, 1, 10, 10, generator=generator)
        y = torch.randint(10, (8,), generator=generator)
    return x[rank::size], y[rank::size]


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(context, x, factor):
        context.factor = factor
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * context.factor, None


def break_module(model, name, kind):
    """Replaces the `forward` of a module by one with a fault."""
    module = model.get_submodule(name)
    right = module.forward

    def wrong(x):
        if kind == "input gradient":
            return right(_Identity.apply(x, 1.5))
        if kind == "output gradient":
            return _Identity.apply(right(x), 0.7)
        if kind == "detached":
            return right(x.detach())
        y = right(x)
        if kind == "scaled":
            return y * (1 + 0.1 * (torch.arange(y.shape[-1]) % 3))
        if kind == "shifted":  # Unequally, as layers that normalise do not see a common change.
            return y + 0.1 * y.detach().std() * (torch.arange(y.shape[-1]) % 3)
        if kind == "permuted":
            return y.roll(1, -1)
        noise = torch.randn(y.shape[1:], generator=torch.Generator().manual_seed(0))
        return y + (0.1 * y.detach().std() * noise).to(y.dtype)

    module.forward = wrong


def train(
    rank, size, *, network, path, dtype="", fault=None, modules=True, replay=None, steps=1,
    weights="",
):  # fmt: skip
    torch.manual_seed(0)
    model = LanguageModel() if network == "gpt" else ResNet()
    if fault:
        break_module(model, *fault)
    called = DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    record = record_torch.record(
        path, called, optimizer, [steps - 1], replay=replay, modules=modules
    )
    with record if modules is not None else contextlib.nullcontext():
        for step in range(steps):
            x, y = batch_of(network, step, rank, size)
            cast = torch.autocast("cpu", getattr(torch, dtype)) if dtype else None
            with cast or contextlib.nullcontext():
                logits = called(x)
            loss = F.cross_entropy(logits.float().flatten(0, -2), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if weights and rank == 0:
        np.savez(weights, *(p.detach().numpy() for p in model.parameters()))


def train_all(rank, size):
    torch.set_num_threads(1)
    for job in json.loads(pathlib.Path("jobs.json").read_text()):
        if job.pop("size", 2) == size:
            train(rank, size, **job)


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train_all(dist.get_rank(), dist.get_world_size())
        dist.barrier()
        os._exit(0)
    train_all(0, 1)
