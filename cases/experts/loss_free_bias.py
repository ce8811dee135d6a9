"""The router's bias balances the load without a gradient, from the tokens of one rank.

id = "experts/loss_free_bias"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["arXiv:2408.15664", "pytorch/torchtitan#1114", "NVIDIA/Megatron-LM#1482"]
date = "2025-04"
tags = ["ddp", "low_precision", "experts"]

[wrong.counts_of_own_tokens]
title = "counts of the own tokens"
place = { node = "update", step = 0, ranks = "all", tensors = ["1.expert_bias"] }

[wrong.counts_of_rank_0]
title = "counts of rank 0"
place = { node = "update", step = 0, ranks = "all", tensors = ["1.expert_bias"] }

[wrong.bias_is_kept_in_bfloat16]
title = "the bias is kept in bfloat16"
place = { node = "update", step = 0, ranks = "all", tensors = ["1.expert_bias"] }
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
EXPERTS, WIDTH, RATE, TOP = 6, 8, 0.037, 2


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 16) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH) / 4)
        self.register_buffer("expert_bias", torch.zeros(EXPERTS))
        self.register_buffer("counts", torch.zeros(EXPERTS), persistent=False)

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.expert_bias).topk(TOP, -1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        self.counts += mask.sum(0).detach()
        weights = scores * mask / (scores * mask).sum(-1, keepdim=True)
        hidden = F.silu(torch.einsum("td,edh->teh", x, self.up))
        return torch.einsum("teh,ehd,te->td", hidden, self.down, weights)

    @torch.no_grad()
    def update_bias(self):
        counts = self.counts.clone()
        if WORLD > 1 and BUG == "counts_of_rank_0":
            dist.broadcast(counts, 0)
        elif WORLD > 1 and BUG != "counts_of_own_tokens":
            dist.all_reduce(counts)
        delta = RATE * torch.sign(counts.mean() - counts)
        self.expert_bias += delta - delta.mean()
        if BUG == "bias_is_kept_in_bfloat16":
            self.expert_bias.copy_(self.expert_bias.bfloat16())
        self.counts.zero_()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    moe = Moe()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), moe, nn.Linear(WIDTH, 2))
    if WORLD > 1:
        model = DistributedDataParallel(model, forward_sync_buffers=False)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    with harness.training(model, optimizer):
        for _ in range(2):
            x = torch.randn(14, WIDTH)
            part = x[RANK::WORLD]
            optimizer.zero_grad()
            F.mse_loss(model(part), part[:, :2].sin()).backward()
            optimizer.step()
            moe.update_bias()
    if WORLD > 1:
        dist.destroy_process_group()


main()
