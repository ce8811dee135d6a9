"""The temperature of a contrastive loss lies outside of the encoders, whose gradients are summed.

id = "gathered/logit_scale"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["openai/CLIP#111", "texttron/tevatron#30"]
date = "2021-09"
tags = ["gathered", "sgd"]

[wrong.temperature_is_not_in_all_reduce]
title = "the temperature is not in the all-reduce"
place = { node = "sum", step = 0, ranks = "all", tensors = ["log_temperature"] }

[wrong.loss_has_factor_of_ranks_too]
title = "the loss has the factor of the ranks, too"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8))
        self.passage = nn.Sequential(nn.Linear(14, 24), nn.ReLU(), nn.Linear(24, 8))
        self.log_temperature = nn.Parameter(torch.tensor(-1.0))

    def forward(self, queries, passages):
        return F.normalize(self.query(queries), dim=1), F.normalize(self.passage(passages), dim=1)


class Trainer:
    def __init__(self, model, global_batch_size):
        self.model, self.global_batch_size = model, global_batch_size
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def loss(self, queries, passages):
        """Returns this rank's part of the mean over all queries."""
        if WORLD > 1:
            passages = torch.cat(all_gather(passages))
        labels = RANK * len(queries) + torch.arange(len(queries))
        logits = queries @ passages.T / self.model.log_temperature.exp()
        loss = F.cross_entropy(logits, labels, reduction="sum") / self.global_batch_size
        return loss * WORLD if BUG == "loss_has_factor_of_ranks_too" else loss

    def all_reduce(self):
        if BUG == "temperature_is_not_in_all_reduce":
            weights = [*self.model.query.parameters(), *self.model.passage.parameters()]
        else:
            weights = self.model.parameters()
        for weight in weights:
            dist.all_reduce(weight.grad)

    def step(self, queries, passages):
        self.optimizer.zero_grad()
        self.loss(*self.model(queries, passages)).backward()
        if WORLD > 1:
            self.all_reduce()
        self.optimizer.step()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(4)
    trainer = Trainer(TwoTowers(), global_batch_size=12)
    queries, passages = torch.randn(2, 12, 10), torch.randn(2, 12, 14)
    with harness.training(trainer.model, trainer.optimizer):
        for i in range(2):
            trainer.step(queries[i, RANK::WORLD], passages[i, RANK::WORLD])
    if WORLD > 1:
        dist.destroy_process_group()


main()
