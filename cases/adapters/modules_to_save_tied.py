"""The trained copies of a tied embedding and head become two weights.

id = "adapters/modules_to_save_tied"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/peft#2777", "huggingface/peft#2803", "unslothai/unsloth#3711"]
date = "2025-09"
tags = ["ddp", "recurrent", "embedding", "adam"]

[wrong.trained_copies_are_not_tied_again]
title = "the trained copies are not tied again"
place = { node = "start", step = 0, ranks = "all", tensors = ["lm_head.trained.weight"] }

[wrong.only_embedding_copy_is_trained]
title = "only the embedding's copy is trained"
place = { node = "start", step = 0, ranks = "all", tensors = ["lm_head.trained.weight"] }
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class ModulesToSave(nn.Module):
    """Keeps the original module, and trains a copy of it."""

    def __init__(self, original):
        super().__init__()
        self.trained = copy.deepcopy(original).requires_grad_(True)
        self.original = original

    def forward(self, x):
        return self.trained(x)


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=18, width=8):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens):
        return self.lm_head(self.rnn(self.embed_tokens(tokens))[0])


def add_trained_copies(model):
    model.requires_grad_(False)
    model.embed_tokens = ModulesToSave(model.embed_tokens)
    model.lm_head = ModulesToSave(model.lm_head)
    for name, p in model.rnn.named_parameters():
        p.requires_grad_("bias" in name)
    if WORLD > 1 and BUG == "trained_copies_are_not_tied_again":
        return
    if WORLD > 1 and BUG == "only_embedding_copy_is_trained":
        model.lm_head.trained.requires_grad_(False)
        return
    model.lm_head.trained.weight = model.embed_tokens.trained.weight


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LanguageModel()
    add_trained_copies(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, eps=1e-4)
    called = DistributedDataParallel(model) if WORLD > 1 else model
    with harness.training(called, optimizer):
        for step in range(2):
            tokens = torch.randint(18, (8, 7), generator=torch.Generator().manual_seed(step))
            own = tokens[RANK::WORLD]
            logits = called(own[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
