"""Sequences are padded on the left to the longest of a rank, and positions count the padding.

id = "data/left_padding"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#29419", "tloen/alpaca-lora#315"]
date = "2024-03"
tags = ["ddp", "embedding", "sgd"]

[wrong.positions_count_padding]
title = "positions count the padding"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["places"] }

[wrong.padding_is_not_masked]
title = "padding is not masked"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCABULARY, WIDTH, CLASSES, PAD = 12, 16, 3, 0
LENGTHS = [6, 10, 3, 7, 5, 9, 4, 2]


class Classifier(nn.Module):
    """Predicts from the last token."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(10, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        is_token = tokens != PAD
        if BUG == "positions_count_padding":
            places = torch.arange(tokens.shape[1]).expand_as(tokens)
        else:
            places = (is_token.cumsum(1) - 1).clamp(min=0)
        x = self.tokens(tokens) + self.places(places)
        mask = None if BUG == "padding_is_not_masked" else is_token.unsqueeze(1)
        y = F.scaled_dot_product_attention(self.q(x[:, -1:]), self.k(x), self.v(x), attn_mask=mask)
        return self.head(torch.tanh(x[:, -1] + y[:, 0]))


def collate(rows):
    longest = max(len(row) for row in rows)
    return torch.stack([F.pad(row, (longest - len(row), 0), value=PAD) for row in rows])


def main():
    torch.manual_seed(6)
    model = Classifier()
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            rows = [torch.randint(1, VOCABULARY, (n,), generator=generator) for n in LENGTHS]
            tokens = collate(rows[RANK::WORLD])
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), tokens.sum(1) % CLASSES).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
