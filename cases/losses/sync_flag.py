"""DDP learns in the forward pass whether to reduce, and the flag is set after it.

id = "losses/sync_flag"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["karpathy/build-nanogpt#30"]
date = "2024-06"
tags = ["ddp", "accumulation", "embedding", "adam"]

[wrong.flag_is_set_after_forward_pass]
title = "the flag is set after the forward pass"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.no_micro_batch_is_synchronised]
title = "no micro-batch is synchronised"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCABULARY, LENGTH, WIDTH, ACCUMULATED = 16, 8, 16, 3


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=1 / math.sqrt(WIDTH))

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight
        q, k, v = self.qkv(self.ln_1(x)).chunk(3, dim=-1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = x + self.out(F.gelu(self.fc(self.ln_2(x))))
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(1337)
model = GPT()
if WORLD > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95), eps=1e-4)
data = torch.randint(VOCABULARY, (2, ACCUMULATED, 4, LENGTH + 1))
with harness.training(model, optimizer):
    for micro_batches in data:
        optimizer.zero_grad()
        for micro_step, batch in enumerate(micro_batches):
            own = batch[RANK::WORLD]
            is_last = micro_step == ACCUMULATED - 1
            if BUG == "no_micro_batch_is_synchronised":
                is_last = False
            if BUG != "flag_is_set_after_forward_pass":
                model.require_backward_grad_sync = is_last
            logits, loss = model(own[:, :-1], own[:, 1:])
            model.require_backward_grad_sync = is_last
            (loss / ACCUMULATED).backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
