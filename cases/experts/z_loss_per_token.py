"""With a loss per token, the z-loss of the router has another weight than the main loss.

id = "experts/z_loss_per_token"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#5047", "NVIDIA/Megatron-LM#1652"]
date = "2026-05"
tags = ["experts", "recurrent", "embedding", "adam"]

[wrong.z_loss_is_mean]
title = "the z-loss is a mean"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.z_loss_is_multiplied_by_all_tokens]
title = "the z-loss is multiplied by all tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.each_rank_divides_by_its_own_tokens]
title = "each rank divides by its own tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH, EXPERTS, WORDS, LENGTH, Z = 16, 3, 24, 8, 0.3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x, _ = self.rnn(self.embed(tokens))
        logits = 4 * self.router(x)
        y = torch.einsum("btd,edh,bte->bth", x, self.experts, logits.softmax(-1))
        return self.head(x + y.tanh()), logits


def batches(steps):
    torch.manual_seed(5)
    lengths = torch.tensor([8, 2, 7, 3, 8, 2, 6, 2])
    for _ in range(steps):
        tokens = torch.randint(WORDS, (len(lengths), LENGTH))
        yield tokens, torch.arange(LENGTH) < lengths[:, None]


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(4)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
with harness.training(model, optimizer):
    for tokens, mask in batches(2):
        tokens, mask = tokens[RANK::WORLD], mask[RANK::WORLD]
        own = mask.sum()
        total = own.clone()
        if WORLD > 1:
            dist.all_reduce(total)
        scores, logits = model(tokens)
        losses = F.cross_entropy(scores[mask], tokens.roll(-1, 1)[mask], reduction="sum")
        z_loss = (logits.logsumexp(-1)[mask] ** 2).mean()
        factor = own
        if BUG == "z_loss_is_mean":
            factor = 1
        elif BUG == "z_loss_is_multiplied_by_all_tokens":
            factor = total
        loss = losses + Z * factor * z_loss
        optimizer.zero_grad()
        if BUG == "each_rank_divides_by_its_own_tokens":
            (loss / own / WORLD).backward()
        else:
            (loss / total).backward()
        for weight in model.parameters():
            if WORLD > 1:
                dist.all_reduce(weight.grad)
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
