"""DDP learns in the forward pass whether to reduce, and the flag is set after it.

reference = "karpathy/build-nanogpt#30"
date = "2024-06"
framework = "torch"

[wrong]
"the flag is set after the forward pass" = ["not_all_reduced", "lost_micro_batch"]
"no micro-batch is synchronised" = ["not_all_reduced"]
"""

import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lockstep

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
with lockstep.record(model, optimizer):
    for micro_batches in data:
        optimizer.zero_grad()
        for micro_step, batch in enumerate(micro_batches):
            own = batch[RANK::WORLD]
            is_last = micro_step == ACCUMULATED - 1
            if BUG == "no micro-batch is synchronised":
                is_last = False
            if BUG != "the flag is set after the forward pass":
                model.require_backward_grad_sync = is_last
            logits, loss = model(own[:, :-1], own[:, 1:])
            model.require_backward_grad_sync = is_last
            (loss / ACCUMULATED).backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
