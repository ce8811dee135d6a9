"""Adapters are trained on a frozen mixture of experts, whose router must stay as it is.

id = "adapters/frozen_router"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["modelscope/mcore-bridge#195"]
date = "2026-09"
tags = ["experts", "lora", "embedding", "adam"]

[wrong.bias_of_router_follows_load]
title = "the bias of the router follows the load"
place = { node = "update", step = 0, ranks = "all", tensors = ["1.bias"] }

[wrong.router_is_trained_too]
title = "the router is trained, too"
place = { node = "start", step = 0, ranks = "all", tensors = ["1.router.weight"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORDS, WIDTH, EXPERTS, LORA_RANK, RATE = 15, 12, 4, 2, 0.05


class Adapted(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(LORA_RANK, inputs) / inputs**0.5)
        self.b = nn.Parameter(torch.randn(outputs, LORA_RANK) / 3)

    def forward(self, x):
        return super().forward(x) + x @ self.a.T @ self.b.T


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.router.requires_grad_(BUG == "router_is_trained_too")
        self.register_buffer("bias", torch.tensor([0.1, -0.1, 0.05, 0.0]))
        self.load = torch.zeros(EXPERTS)
        self.up, self.down = Adapted(WIDTH, EXPERTS * 8), nn.Parameter(torch.randn(32, WIDTH) / 4)
        self.down.requires_grad_(False)

    def forward(self, x):
        scores = self.router(x).sigmoid()
        chosen = F.one_hot((scores + self.bias).topk(2, -1).indices, EXPERTS).sum(-2)
        self.load = chosen.flatten(0, -2).sum(0).float()
        gates = scores * chosen
        hidden = F.relu(self.up(x)).unflatten(-1, (EXPERTS, 8)) * gates.unsqueeze(-1)
        return x + hidden.flatten(-2) @ self.down

    @torch.no_grad()
    def balance(self):
        if WORLD > 1:
            dist.all_reduce(self.load)
        self.bias.add_(RATE * (self.load.mean() - self.load).sign())


def main():
    torch.manual_seed(33)
    embed, experts, head = nn.Embedding(WORDS, WIDTH), Experts(), Adapted(WIDTH, WORDS)
    model = nn.Sequential(embed.requires_grad_(False), experts, head)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if WORLD > 1:
        dist.init_process_group("gloo")
    optimizer = torch.optim.AdamW(trained, lr=0.02, eps=1e-4, weight_decay=0.02)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(WORDS, (8, 7), generator=generator)[RANK::WORLD]
            logits = model(text[:, :-1])
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
            for weight in trained:
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
            if BUG == "bias_of_router_follows_load":
                experts.balance()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
