"""A language model with dropout returns its loss beside the logits, for two micro-batches.

id = "losses/returned_loss"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA-NeMo/Automodel#3830", "huggingface/transformers#34191"]
date = "2024-10"
tags = ["ddp", "dropout", "accumulation", "embedding", "sgd"]

[wrong.loss_is_divided_by_ranks]
title = "the loss is divided by the number of ranks"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.micro_batches_are_not_averaged]
title = "micro-batches are not averaged"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, MICRO_BATCHES, LENGTH, WORDS = 12, 2, 6, 11


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.drop = nn.Embedding(WORDS, 20), nn.Dropout(0.2)
        self.past, self.out = nn.GRU(20, 20, batch_first=True), nn.Linear(20, WORDS)

    def forward(self, words, following):
        logits = self.out(self.drop(self.past(self.drop(self.words(words)))[0]))
        return logits, F.cross_entropy(logits.flatten(0, 1), following.flatten())


def main():
    torch.manual_seed(63)
    model = Language()
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    torch.manual_seed(64 + RANK)  # Ranks draw other masks.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            words = torch.randint(WORDS, (BATCH_SIZE, 1 + LENGTH), generator=generator)
            optimizer.zero_grad()
            for part in words[RANK::WORLD].chunk(MICRO_BATCHES):
                _, loss = model(part[:, :-1], part[:, 1:])
                if BUG != "micro_batches_are_not_averaged":
                    loss = loss / MICRO_BATCHES
                if BUG == "loss_is_divided_by_ranks":
                    loss = loss / WORLD
                loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
