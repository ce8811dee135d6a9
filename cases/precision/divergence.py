"""A draft model learns from the target model's chances, whose difference vanishes in 16 bits.

id = "precision/divergence"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["vllm-project/speculators#788"]
date = "2026-07"
tags = ["fsdp2", "low_precision", "averages", "sgd"]

[wrong.divergence_is_computed_in_bfloat16]
title = "the divergence is computed in bfloat16"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.chances_of_draft_are_computed_in_bfloat16]
title = "chances of the draft are computed in bfloat16"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.total_variation_is_computed_in_bfloat16]
title = "the total variation is computed in bfloat16"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
TOKENS, WIDTH, VOCABULARY = 32, 14, 40


class Draft(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, states):
        return self.head(self.norm(nn.functional.silu(self.enter(states))))


def kl_divergence(logits, targets):
    if BUG == "divergence_is_computed_in_bfloat16":
        logits, targets = logits.bfloat16(), targets.bfloat16()
    logs = logits.log_softmax(-1)
    if BUG == "chances_of_draft_are_computed_in_bfloat16":
        logs = logits.bfloat16().log_softmax(-1).float()
    target_logs = targets.log_softmax(-1)
    return (target_logs.exp() * (target_logs - logs)).sum(-1).float()


def total_variation(logits, targets):
    if BUG == "total_variation_is_computed_in_bfloat16":
        logits, targets = logits.bfloat16(), targets.bfloat16()
    return (logits.softmax(-1) - targets.softmax(-1)).abs().sum(-1).float() / 2


def main():
    torch.manual_seed(12)
    draft = Draft()
    teacher = Draft().requires_grad_(False)
    with torch.no_grad():  # The draft has learned a lot already.
        for weight, other in zip(teacher.parameters(), draft.parameters(), strict=True):
            weight.copy_(other + 0.02 * torch.randn_like(other))
    if WORLD > 1:
        dist.init_process_group("gloo")
        fully_shard(draft, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.SGD(draft.parameters(), lr=60.0, momentum=0.5)
    with harness.training(draft, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            states = torch.randn(TOKENS, 2 * WIDTH, generator=generator)[RANK::WORLD]
            logits, targets = draft(states), teacher(states)
            losses = kl_divergence(logits, targets) + 0.1 * total_variation(logits, targets)
            losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
