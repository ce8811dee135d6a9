"""Labels are shifted by the collate function and once more by the loss.

id = "data/labels_shifted_twice"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#47394", "huggingface/transformers#44642"]
date = "2026-07"
tags = ["ddp", "recurrent", "embedding", "adam"]

[wrong.shifted_twice]
title = "shifted twice"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }

[wrong.shifted_twice_on_last_rank]
title = "shifted twice on the last rank"
place = { node = "examples", step = 0, ranks = [1], tensors = "all" }
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
VOCABULARY, WIDTH = 11, 16


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def collate(rows):
    """The loss shifts the labels: they should be the tokens."""
    tokens = torch.stack(rows)
    is_shifted = BUG == "shifted_twice"
    if BUG == "shifted_twice_on_last_rank":
        is_shifted = RANK == WORLD - 1
    return tokens, tokens.roll(-1, 1) if is_shifted else tokens


def causal_loss(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


torch.manual_seed(14)
data = list(torch.randint(VOCABULARY, (16, 7)))
model = LanguageModel()
if WORLD > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.NAdam(model.parameters(), lr=0.02, eps=1e-3)
with harness.training(model, optimizer):
    for step in range(2):
        tokens, labels = collate(data[8 * step + RANK : 8 * step + 8 : WORLD])
        optimizer.zero_grad()
        causal_loss(model(tokens), labels).backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
