"""After an evaluation on rank 0, its model stays in evaluation mode.

id = "random/evaluation_mode"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["shubhamagarwal92/mmd#14", "fartashf/vsepp#4"]
date = "2018-01"
tags = ["dropout"]

[wrong.rank_0_stays_in_evaluation_mode]
title = "rank 0 stays in evaluation mode"
place = { node = "between", step = 0, ranks = [0], tensors = "all" }

[wrong.all_ranks_stay_in_evaluation_mode]
title = "all ranks stay in evaluation mode"
place = { node = "between", step = 0, ranks = "all", tensors = "all" }

[wrong.first_block_stays_in_evaluation_mode]
title = "the first block stays in evaluation mode"
place = { node = "between", step = 0, ranks = [0], tensors = ["1.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

GLOBAL_BATCH_SIZE = 8


class GlobalDropout(nn.Dropout):
    """Draws a mask for the global batch and drops with the rank's rows."""

    def forward(self, x):
        if not self.training:
            return x
        keep = torch.rand(GLOBAL_BATCH_SIZE, *x.shape[1:]) >= self.p
        return x * keep[RANK::WORLD] / (1 - self.p)


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        block = [nn.Linear(12, 12), nn.ReLU(), GlobalDropout(0.3)]
        self.model = nn.Sequential(
            nn.Linear(6, 12),
            nn.Sequential(*block),
            nn.Sequential(nn.Linear(12, 12), nn.ReLU(), GlobalDropout(0.3)),
            nn.Linear(12, 1),
        )
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.05)

    def step(self, number):
        torch.manual_seed(number)
        x = torch.randn(GLOBAL_BATCH_SIZE, 6)
        y = (x[:, :1] * x[:, 1:2])[RANK::WORLD]
        loss = nn.functional.huber_loss(self.model(x[RANK::WORLD]), y)
        self.optimizer.zero_grad()
        loss.backward()
        for weight in self.model.parameters() if WORLD > 1 else ():
            dist.all_reduce(weight.grad)
            weight.grad /= WORLD
        self.optimizer.step()

    def evaluate(self):
        if RANK != 0 and BUG != "all_ranks_stay_in_evaluation_mode":
            return
        self.model.eval()
        with torch.no_grad():
            x = torch.ones(2, 6)
            for layer in self.model:
                x = layer(x)
        if not BUG:
            self.model.train()
        if BUG == "first_block_stays_in_evaluation_mode":
            self.model[2].train()

    def fit(self):
        with harness.training(self.model, self.optimizer):
            for number in range(3):
                self.step(number)
                self.evaluate()


if WORLD > 1:
    dist.init_process_group("gloo")
Trainer().fit()
if WORLD > 1:
    dist.destroy_process_group()
