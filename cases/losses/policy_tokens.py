"""A policy's loss averages tokens of completions, which are longer and fewer on one rank.

id = "losses/policy_tokens"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/trl#6713", "huggingface/trl#3231", "verl-project/verl#593"]
date = "2026-08"
tags = ["ddp", "recurrent", "gathered", "embedding", "adam"]

[wrong.mean_over_rank_tokens]
title = "the mean over the rank's tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.mean_over_each_sequence_first]
title = "the mean over each sequence first"
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
VOCABULARY, LENGTH, CLIP = 11, 12, 0.2
# The first five completions are short; a planner that balances tokens gives them to rank 0.
COMPLETION_LENGTHS = torch.tensor([2, 3, 4, 3, 2, 11, 9, 12])
OWN = slice(0, 8) if WORLD == 1 else (slice(0, 5), slice(5, 8))[RANK]


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.lstm, self.head = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])


def token_losses(logits, tokens, advantages, old_chances):
    """Returns the clipped loss of each token."""
    log_chances = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    ratio = (log_chances - old_chances).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])


def aggregate(losses, mask):
    """Returns the loss of the rank from those of tokens."""
    if BUG == "mean_over_rank_tokens":
        return (losses * mask).sum() / mask.sum()
    if BUG == "mean_over_each_sequence_first":
        sums = ((losses * mask).sum(1) / mask.sum(1)).sum()
        return WORLD * sums / len(COMPLETION_LENGTHS)
    num_tokens = mask.sum()
    if WORLD > 1:
        dist.all_reduce(num_tokens)
    return WORLD * (losses * mask).sum() / num_tokens


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Policy()
    rollouts = torch.randint(VOCABULARY, (2, 8, LENGTH + 1))
    advantages = torch.randn(2, 8)
    mask = (torch.arange(LENGTH) < COMPLETION_LENGTHS[:, None]).float()
    old_chances = torch.log(torch.full((8, LENGTH), 1 / VOCABULARY)) + 0.05 * torch.randn(8, LENGTH)
    if WORLD > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-4)
    with harness.training(model, optimizer):
        for tokens, advantage in zip(rollouts[:, OWN], advantages[:, OWN], strict=True):
            logits = model(tokens[:, :-1])
            losses = token_losses(logits, tokens[:, 1:], advantage, old_chances[OWN])
            optimizer.zero_grad()
            aggregate(losses, mask[OWN]).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
