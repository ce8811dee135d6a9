"""LoRA+ gives A, B and embeddings rates of their own, by the names of the weights.

id = "adapters/loraplus_groups"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/peft#3503"]
date = "2026-08"
tags = ["ddp", "lora", "embedding", "adam"]

[wrong.b_of_embedding_is_in_group_of_a]
title = "B of the embedding is in the group of A"
place = { node = "update", step = 0, ranks = "all", tensors = ["embed_lora_embedding_B"] }

[wrong.names_begin_with_wrapper]
title = "names begin with the wrapper"
place = { node = "update", step = 0, ranks = "all", tensors = ["embed_lora_A"] }
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
WORDS, WIDTH, LORA_RANK = 15, 10, 3
RATE, RATIO, EMBEDDING_RATE = 0.01, 4, 0.002


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.embed_lora_A = nn.Parameter(torch.randn(WORDS, LORA_RANK))
        self.embed_lora_embedding_B = nn.Parameter(torch.randn(LORA_RANK, WIDTH) / 4)
        self.head = nn.Linear(WIDTH, WORDS).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(LORA_RANK, WIDTH) / 2)
        self.lora_B = nn.Parameter(torch.randn(WORDS, LORA_RANK) / 4)

    def forward(self, words):
        x = self.embed(words) + self.embed_lora_A[words] @ self.embed_lora_embedding_B
        x = F.gelu(x)
        return self.head(x) + x @ self.lora_A.T @ self.lora_B.T


def group_of(name):
    if name.startswith("embed") and name.endswith("_A"):
        return EMBEDDING_RATE
    if BUG == "b_of_embedding_is_in_group_of_a":
        is_fast = "lora_B" in name
    else:
        is_fast = name.endswith("_B")
    return RATE * RATIO if is_fast else RATE


def make_optimizer(model):
    groups = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            groups.setdefault(group_of(name), []).append(weight)
    return torch.optim.AdamW(
        [{"params": weights, "lr": rate} for rate, weights in groups.items()], eps=1e-4
    )


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    tagger = Tagger()
    model = DistributedDataParallel(tagger) if WORLD > 1 else tagger
    optimizer = make_optimizer(model if BUG == "names_begin_with_wrapper" else tagger)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            words = torch.randint(WORDS, (12, 7), generator=generator)[RANK::WORLD]
            loss = F.cross_entropy(model(words).flatten(0, 1), ((words * 2) % WORDS).flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
