"""An expert that got no token on a rank, or on any, has no gradient there.

id = "experts/experts_without_tokens"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA-NeMo/Automodel#2995", "ScienceOne-AI/DeepSeek-671B-SFT-Guide#7"]
date = "2026-07"
tags = ["experts", "adam"]

[wrong.expert_without_tokens_is_not_updated]
title = "an expert without tokens is not updated"
place = { node = "update", step = 0, ranks = "all", tensors = ["experts.3.*"] }

[wrong.rank_keeps_its_gradient_where_another]
title = "a rank keeps its gradient where another has none"
place = { node = "sum", step = 0, ranks = "all", tensors = ["experts.2.*"] }

[wrong.ranks_without_tokens_do_not_count]
title = "ranks without tokens do not count"
place = { node = "sum", step = 0, ranks = "all", tensors = ["experts.2.*"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXPERTS, WIDTH, BATCH = 4, 6, 16


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        """Sends each example to the expert whose number its last feature says."""
        chosen, y = x[:, -1].long(), torch.zeros(len(x), WIDTH)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]).tanh())
        return self.head(x + y)


def batches(steps):
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        # Expert 3 gets no token of any rank, and expert 2 none of the second half.
        x[:, -1] = torch.tensor([0, 1, 2, 2, 0, 1, 0, 2, 0, 1, 0, 1, 1, 0, 1, 0])
        yield x, x[:, :3].argmax(-1)


def average_gradients(model):
    for weight in model.parameters():
        has_tokens = torch.tensor(float(weight.grad is not None))
        if WORLD > 1:
            dist.all_reduce(has_tokens)
        if not has_tokens and BUG == "expert_without_tokens_is_not_updated":
            continue
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        if WORLD == 1:
            continue
        if BUG == "rank_keeps_its_gradient_where_another" and has_tokens < WORLD:
            continue
        dist.all_reduce(weight.grad)
        few = BUG == "ranks_without_tokens_do_not_count"
        weight.grad /= has_tokens.clamp(min=1) if few else WORLD


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
    with harness.training(model, optimizer):
        for x, y in batches(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.chunk(WORLD)[RANK]), y.chunk(WORLD)[RANK])
            loss.backward()
            average_gradients(model)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
