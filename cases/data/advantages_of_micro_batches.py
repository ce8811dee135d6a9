"""Answers are split over ranks within each micro-batch, and their advantages over the whole batch.

id = "data/advantages_of_micro_batches"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["tenstorrent/tt-metal#46548", "tenstorrent/tt-metal#46412"]
date = "2026-06"
tags = ["ddp", "accumulation", "recurrent", "gathered", "embedding", "adam"]

[wrong.advantages_are_split_before_micro_batches]
title = "advantages are split before the micro-batches"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }

[wrong.groups_are_those_of_micro_batch_on_rank]
title = "groups are those of a micro-batch on a rank"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORDS, WIDTH, LENGTH, PROMPTS, ANSWERS, MICRO_BATCHES = 10, 12, 6, 2, 8, 2


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        return self.head(self.cell(self.embed(tokens))[0])


def advantages_of(rewards, group):
    rewards = rewards.unflatten(0, (-1, group))
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def own(batch, micro_batch):
    """Takes the part of a micro-batch that the rank computes."""
    return batch.chunk(MICRO_BATCHES)[micro_batch].chunk(WORLD)[RANK]


def own_advantages(rewards, micro_batch):
    if BUG == "groups_are_those_of_micro_batch_on_rank":
        rewards = own(rewards, micro_batch)
        return advantages_of(rewards, len(rewards))
    advantages = advantages_of(rewards, ANSWERS)
    if BUG == "advantages_are_split_before_micro_batches":
        return advantages.chunk(WORLD)[RANK].chunk(MICRO_BATCHES)[micro_batch]
    return own(advantages, micro_batch)


def main():
    torch.manual_seed(1)
    model = Policy()
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(WORDS, (PROMPTS * ANSWERS, LENGTH), generator=generator)
            rewards = (text == text[:, :1]).float().sum(1) + 0.1 * text[:, 1]
            optimizer.zero_grad()
            for micro_batch in range(MICRO_BATCHES):
                is_last = micro_batch == MICRO_BATCHES - 1
                tokens, advantages = own(text, micro_batch), own_advantages(rewards, micro_batch)
                with contextlib.nullcontext() if is_last or WORLD == 1 else model.no_sync():
                    log_probs = F.log_softmax(model(tokens[:, :-1]), -1)
                    log_probs = log_probs.gather(2, tokens[:, 1:, None]).squeeze(2)
                    loss = -(log_probs * advantages[:, None]).mean()
                    (loss / MICRO_BATCHES).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
