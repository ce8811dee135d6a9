"""Ranks have two chunks of each sequence, and the labels of the last places come from others.

id = "parallel/labels_rolled_in_parts"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["verl-project/verl#4250", "THUDM/slime#73"]
date = "2025-07"
tags = ["ddp", "gathered", "embedding", "sgd"]

[wrong.labels_are_rolled_within_rank]
title = "labels are rolled within a rank"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }

[wrong.labels_are_rolled_within_chunk]
title = "labels are rolled within a chunk"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }

[wrong.loss_has_factor_of_ranks]
title = "the loss has the factor of the ranks"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORDS, WIDTH, HEADS, LENGTH = 13, 12, 3, 16


def own_chunks(x):
    """Takes the chunks of the rank from the front and from the back of each sequence."""
    chunks = x.chunk(2 * WORLD, 1)
    return torch.cat([chunks[RANK], chunks[2 * WORLD - 1 - RANK]], 1)


class InOrder(torch.autograd.Function):
    """Gathers the chunks of all ranks in the order of the sequence."""

    @staticmethod
    def forward(ctx, x):
        if WORLD == 1:
            return x.view_as(x)
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        halves = [part.chunk(2, 1) for part in parts]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves[::-1]], 1)

    @staticmethod
    def backward(ctx, gradient):
        if WORLD == 1:
            return gradient
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return own_chunks(gradient)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        places = own_chunks(torch.arange(LENGTH).unsqueeze(0))
        x = self.embed(tokens) + self.places(places)
        queries, keys, values = self.qkv(x).chunk(3, -1)
        keys, values = InOrder.apply(keys), InOrder.apply(values)
        heads = [y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (queries, keys, values)]
        mask = places[0][:, None] >= torch.arange(LENGTH)
        y = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


def labels_of(tokens):
    """Each place has the next token as its label, and the last one the first."""
    if BUG == "labels_are_rolled_within_rank":
        return own_chunks(tokens).roll(-1, 1)
    if BUG == "labels_are_rolled_within_chunk":
        return torch.cat([half.roll(-1, 1) for half in own_chunks(tokens).chunk(2, 1)], 1)
    return own_chunks(tokens.roll(-1, 1))


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
        layout = {"mesh": mesh, "dims": "b s[cp:zigzag]"}
    torch.manual_seed(28)
    model = Model()
    if WORLD > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9, weight_decay=0.01)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(WORDS, (5, LENGTH), generator=generator)
            logits = model(own_chunks(tokens))
            loss = F.cross_entropy(logits.flatten(0, 1), labels_of(tokens).flatten())
            if BUG == "loss_has_factor_of_ranks":
                loss = loss * WORLD
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
