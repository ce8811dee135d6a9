"""The loss of multi-token prediction is weighted by the counts of tokens of the own rank.

id = "parallel/finding_03_mtp_token_counts"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#7452", "NVIDIA/Megatron-LM#7498"]
date = "2026-09"
tags = ["ddp", "embedding", "adam"]

[wrong.ratio_of_own_counts]
title = "ratio of the own counts"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.mean_over_own_tokens]
title = "mean over the own tokens"
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
VOCABULARY, WIDTH, LENGTH, IGNORED = 12, 16, 8, -100


class TwoHeads(nn.Module):
    """Predicts the next token, and from a further layer the token after it."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.trunk, self.further = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight
        x = F.gelu(self.trunk(x)).cumsum(1) / 4
        return self.head(x), self.head(x + F.gelu(self.further(x)))


def get_batch(step):
    """Sequences of unequal length: the longest are on rank 0."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(VOCABULARY, (6, LENGTH + 2), generator=generator)
    valid = torch.arange(LENGTH + 2) < torch.tensor([10, 4, 9, 3, 8, 5]).unsqueeze(1)
    labels = text.where(valid, IGNORED)
    return text[RANK::WORLD, :LENGTH], labels[RANK::WORLD, 1:-1], labels[RANK::WORLD, 2:]


def total_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def compute_loss(outputs, targets, further_targets):
    own = torch.tensor([float((t != IGNORED).sum()) for t in (targets, further_targets)])
    counts = own.clone()
    if WORLD > 1:
        dist.all_reduce(counts)
    main, further = total_loss(outputs[0], targets), total_loss(outputs[1], further_targets)
    if BUG == "ratio_of_own_counts":
        further = further * own[0] / own[1] / counts[0]
    elif BUG == "mean_over_own_tokens":
        further = further / own[1] / WORLD
    else:
        further = further / counts[1]
    return WORLD * (main / counts[0] + 0.5 * further)  # DDP averages over ranks.


def main():
    torch.manual_seed(3)
    model = TwoHeads()
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4)
    with harness.training(model, optimizer):
        for step in range(2):
            tokens, *targets = get_batch(step)
            optimizer.zero_grad()
            compute_loss(model(tokens), *targets).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
