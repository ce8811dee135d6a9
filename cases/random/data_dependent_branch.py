"""Each rank decides by its own examples what all should decide together.

id = "random/data_dependent_branch"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["NVIDIA-NeMo/Automodel#2468", "facebookresearch/fairseq2#484"]
date = "2026-06"
tags = ["sgd"]

[wrong.each_rank_leaves_out_its_batch_itself]
title = "each rank leaves out its batch itself"
place = { node = "gradient", step = 2, ranks = [0], tensors = "all" }

[wrong.each_rank_chooses_branch_itself]
title = "each rank chooses the branch itself"
place = { node = "outputs", step = 1, ranks = [0], tensors = "all" }

[wrong.each_rank_skips_update_itself]
title = "each rank skips the update itself"
place = { node = "update", step = 2, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def largest(value):
    """Returns the largest value of all ranks."""
    value = value.detach().clone()
    if WORLD > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 1)

    def forward(self, x):
        h = self.up(x)
        size = h.detach().abs().max()
        if BUG != "each_rank_chooses_branch_itself":
            size = largest(size)
        if size > 2.5:  # The whole batch is scaled.
            h = h / 4
        return self.down(torch.tanh(h))


torch.manual_seed(0)
if WORLD > 1:
    dist.init_process_group("gloo")
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
with harness.training(model, optimizer):
    for step in range(4):  # One update is skipped.
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        if step == 1:
            x[1] *= 8  # Large activations on rank 1.
        y = x.sum(dim=1, keepdim=True).tanh()
        if step == 2:
            y[2] += 30  # A spike of the loss on rank 0.
        losses = (model(x[RANK::WORLD]) - y[RANK::WORLD]).square()
        optimizer.zero_grad()
        (losses.sum() / 8).backward()
        own_spike = losses.max() > 400
        spike = largest(losses.max()) > 400
        if BUG == "each_rank_leaves_out_its_batch_itself":
            spike = False
            if own_spike:
                optimizer.zero_grad(set_to_none=False)
        for weight in model.parameters() if WORLD > 1 else ():
            dist.all_reduce(weight.grad)
        if BUG == "each_rank_skips_update_itself":
            spike = own_spike
        if not spike:
            optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
