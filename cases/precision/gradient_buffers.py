"""Gradients of micro-batches are added in bfloat16 instead of float32 main gradients.

id = "precision/gradient_buffers"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["deepspeedai/DeepSpeed#1800", "NVIDIA/Megatron-LM#502", "NVIDIA/Megatron-LM#372"]
date = "2022-03"
tags = ["low_precision", "accumulation", "recurrent", "embedding", "adam"]

[wrong.micro_batches_are_added_in_bfloat16]
title = "micro-batches are added in bfloat16"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.main_gradients_are_sent_in_bfloat16]
title = "main gradients are sent in bfloat16"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.buffer_of_embedding_is_in_bfloat16]
title = "the buffer of the embedding is in bfloat16"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["embedding.weight"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE = 32, 2


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.rnn = nn.GRU(8, 10, batch_first=True)
        self.head = nn.Linear(10, 11)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0])


def add_to_main_grad(weight):
    weight.main_grad.add_(weight.grad.to(weight.main_grad.dtype))
    weight.grad = None


torch.manual_seed(0)
if WORLD > 1:
    dist.init_process_group("gloo")
model = Reader()
for name, weight in model.named_parameters():
    in_16_bits = BUG == "micro_batches_are_added_in_bfloat16" or (
        BUG == "buffer_of_embedding_is_in_bfloat16" and "embedding" in name
    )
    dtype = torch.bfloat16 if in_16_bits else torch.float32
    weight.main_grad = torch.zeros_like(weight, dtype=dtype)
    weight.register_post_accumulate_grad_hook(add_to_main_grad)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3)
with harness.training(model, optimizer):
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(11, (GLOBAL_BATCH_SIZE, 6), generator=generator)[RANK::WORLD]
        for part in tokens.split(MICRO_BATCH_SIZE):
            logits = model(part[:, :-1])
            losses = nn.functional.cross_entropy(
                logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
            )
            (losses / (GLOBAL_BATCH_SIZE * 5)).backward()
        for weight in model.parameters():
            total = weight.main_grad
            if BUG == "main_gradients_are_sent_in_bfloat16":
                total = total.bfloat16()
            if WORLD > 1:
                dist.all_reduce(total)
            weight.grad = total.to(torch.float32, copy=True)
            weight.main_grad.zero_()
        optimizer.step()
        optimizer.zero_grad()
if WORLD > 1:
    dist.destroy_process_group()
