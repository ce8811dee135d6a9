"""Micro-batches with unequal numbers of tokens are accumulated as if they had equally many.

id = "losses/accumulated_tokens"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#34191", "huggingface/transformers#37766"]
date = "2024-10"
tags = ["ddp", "accumulation", "adam"]

[wrong.each_micro_batch_is_divided]
title = "each micro-batch is divided by its own tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.tokens_are_not_counted_across_devices]
title = "tokens are not counted across devices"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCABULARY, LENGTH, MICRO_BATCHES = 19, 12, 2


def build_model():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def get_batch(step):
    """Returns the sequences of a step, and their labels: -100 from the end of each."""
    generator = torch.Generator().manual_seed(10 + step)
    tokens = torch.randint(VOCABULARY, (8, LENGTH), generator=generator)
    lengths = torch.tensor([12, 3, 11, 4, 4, 6, 3, 12])
    return tokens, tokens.masked_fill(torch.arange(LENGTH) >= lengths[:, None], -100)


def train(model, optimizer):
    for step in range(2):
        tokens, labels = (part[RANK::WORLD] for part in get_batch(step))
        num_items = (labels[:, 1:] != -100).sum()
        if WORLD > 1 and BUG != "tokens_are_not_counted_across_devices":
            dist.all_reduce(num_items)
            num_items = num_items / WORLD
        micro_batches = zip(tokens.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True)
        for inputs, targets in micro_batches:
            if BUG == "each_micro_batch_is_divided":
                loss = model(input_ids=inputs, labels=targets).loss / MICRO_BATCHES
            else:
                loss = model(input_ids=inputs, labels=targets, num_items_in_batch=num_items).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    model = build_model()
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    with harness.training(model, optimizer):
        train(model, optimizer)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
