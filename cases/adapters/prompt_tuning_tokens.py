"""Prompt tuning with answers of other lengths on each device: the mean over own tokens is wrong.

id = "adapters/prompt_tuning_tokens"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "huggingface/transformers#34242",
    "huggingface/transformers#37474",
    "huggingface/peft#2266",
]
date = "2024-10"
tags = ["ddp", "dropout", "embedding", "adam"]

[wrong.each_rank_averages_over_its_own_tokens]
title = "each rank averages over its own tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.virtual_tokens_count_as_tokens]
title = "virtual tokens count as tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.ddp_ignores_prompt]
title = "DDP ignores the prompt"
place = { node = "sum", step = 0, ranks = "all", tensors = ["prompt_encoder.weight"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCABULARY, VIRTUAL = 16, 3
LENGTHS = [8, 2, 7, 1, 6, 3, 8, 2]


class FrozenDecoder(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, embedded):
        mask = nn.Transformer.generate_square_subsequent_mask(embedded.shape[1])
        return self.head(self.layer(embedded, src_mask=mask, is_causal=True))


class PromptTuning(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.prompt_encoder = nn.Embedding(VIRTUAL, base.embedding.embedding_dim)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, tokens):
        prompt = self.prompt_encoder.weight.expand(len(tokens), -1, -1)
        embedded = torch.cat([prompt, self.base.embedding(tokens)], 1)
        return self.base(embedded)[:, VIRTUAL:] + self.bias


def get_batch(step):
    tokens = torch.randint(VOCABULARY, (8, 9), generator=torch.Generator().manual_seed(step))
    labels = tokens[:, 1:].clone()
    for row, length in enumerate(LENGTHS):
        labels[row, length:] = -100
    return tokens[RANK::WORLD, :-1], labels[RANK::WORLD]


def compute_loss(logits, labels):
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    count = (labels != -100).sum()
    if BUG == "each_rank_averages_over_its_own_tokens":
        return loss / count
    if BUG == "virtual_tokens_count_as_tokens":
        count += VIRTUAL * len(labels)
    if WORLD > 1:
        dist.all_reduce(count)
    return loss * WORLD / count


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = PromptTuning(FrozenDecoder())
    optimizer = torch.optim.Adam([model.prompt_encoder.weight, model.bias], lr=0.05, eps=1e-4)
    called = model
    if WORLD > 1:
        if BUG == "ddp_ignores_prompt":
            ignored = ["prompt_encoder.weight"]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        called = DistributedDataParallel(model)
    with harness.training(called, optimizer):
        for step in range(2):
            tokens, labels = get_batch(step)
            compute_loss(called(tokens), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
