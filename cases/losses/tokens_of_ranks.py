"""Ranks hold different numbers of tokens, and each divides its loss by its own number.

id = "losses/tokens_of_ranks"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "pytorch/torchtitan#2206",
    "huggingface/transformers#34373",
    "facebookresearch/fairseq#494",
]
date = "2026-01"
tags = ["ddp", "dropout", "embedding", "sgd"]

[wrong.each_rank_divides_by_its_own_tokens]
title = "each rank divides by its own tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.average_of_ddp_is_not_undone]
title = "the average of DDP is not undone"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
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
VOCABULARY, LENGTH, WIDTH, IGNORED = 17, 10, 16, -100


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.tokens(tokens) + self.positions.weight
        return self.head(self.block(x, src_mask=causal, is_causal=True))


def get_batch(step):
    """Returns eight sequences and their next tokens; every second one is short."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=generator)
    lengths = torch.tensor([3, 9, 2, 10, 4, 8, 3, 10])
    targets = tokens[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths[:, None], IGNORED)
    return tokens[:, :-1], targets


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = LanguageModel()
if WORLD > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
with harness.training(model, optimizer):
    for step in range(2):
        inputs, targets = (part[RANK::WORLD] for part in get_batch(step))
        num_tokens = (targets != IGNORED).sum()
        if WORLD > 1 and BUG != "each_rank_divides_by_its_own_tokens":
            dist.all_reduce(num_tokens)
            if BUG != "average_of_ddp_is_not_undone":
                num_tokens = num_tokens / WORLD
        logits = model(inputs).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        optimizer.zero_grad()
        (loss / num_tokens).backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
