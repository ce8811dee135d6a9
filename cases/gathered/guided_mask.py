"""A guide takes false negatives out of the gathered candidates, but never the own positives.

id = "gathered/guided_mask"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/sentence-transformers#3817"]
date = "2026-06"
tags = ["gathered", "sgd"]

[wrong.first_columns_are_protected_on_all_ranks]
title = "the first columns are protected on all ranks"
place = { node = "loss", step = 0, ranks = [1], tensors = "all" }

[wrong.thresholds_are_those_of_first_columns]
title = "thresholds are those of the first columns"
place = { node = "loss", step = 0, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, WIDTH, TEMPERATURE, MARGIN = 8, 6, 0.3, 0.05


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x):
        return F.normalize(self.layers(x), dim=-1)


def gather(x):
    return torch.cat(all_gather(x.contiguous())) if WORLD > 1 else x


def guided_loss(anchors, positives, guide_anchors, guide_positives):
    offset = RANK * len(anchors)
    labels = torch.arange(len(anchors)) + offset
    logits = anchors @ gather(positives).T / TEMPERATURE
    guide = guide_anchors @ gather(guide_positives).T
    protected = labels
    if BUG == "first_columns_are_protected_on_all_ranks":
        protected = torch.arange(len(anchors))
    first = 0 if BUG == "thresholds_are_those_of_first_columns" else offset
    threshold = guide.diagonal(first)[: len(anchors), None] - MARGIN
    is_false = guide > threshold
    is_false[torch.arange(len(anchors)), protected] = False
    return F.cross_entropy(logits.masked_fill(is_false, -30.0), labels)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(10)
    guide, encoder = Encoder().requires_grad_(False), Encoder()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.3, momentum=0.9)
    with harness.training(encoder, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            queries = torch.randn(BATCH_SIZE, 9, generator=generator)
            answers = queries + torch.randn(BATCH_SIZE, 9, generator=generator)
            queries, answers = queries.chunk(WORLD)[RANK], answers.chunk(WORLD)[RANK]
            both = encoder(torch.stack([queries, answers], 1))
            loss = guided_loss(*both.unbind(1), guide(queries), guide(answers))
            optimizer.zero_grad()
            loss.backward()
            for weight in encoder.parameters() if WORLD > 1 else ():
                dist.all_reduce(weight.grad)
                weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
