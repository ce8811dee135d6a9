"""Each rank divides by its own number of tokens, or pads to a length that enters the mean.

id = "data/padding_in_the_mean"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#34242", "huggingface/transformers#34373"]
date = "2024-10"
tags = ["ddp", "recurrent", "embedding", "sgd"]

[wrong.mean_over_own_tokens]
title = "mean over the own tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.mean_over_own_padded_length]
title = "mean over the own padded length"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCABULARY, WIDTH, PAD = 10, 12, 0
LENGTHS = [9, 3, 8, 4, 10, 2]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.RNN(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def get_batch(step):
    generator = torch.Generator().manual_seed(step)
    rows = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    return nn.utils.rnn.pad_sequence(rows[RANK::WORLD], batch_first=True, padding_value=PAD)


def compute_loss(logits, tokens):
    mask = tokens != PAD
    losses = nn.functional.cross_entropy(logits.mT, tokens % 3, reduction="none") * mask
    count = mask.sum().float()
    if BUG == "mean_over_own_tokens":
        return losses.sum() / count
    if BUG == "mean_over_own_padded_length":
        return losses.mean()
    if WORLD > 1:
        dist.all_reduce(count)
    return WORLD * losses.sum() / count


torch.manual_seed(5)
model = Tagger()
if WORLD > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
with harness.training(model, optimizer):
    for step in range(2):
        tokens = get_batch(step)
        optimizer.zero_grad()
        compute_loss(model(tokens), tokens).backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
