"""The learning rate adapts to the change of the policy, and a copy of it is not restored.

id = "resume/adaptive_rate"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["leggedrobotics/rsl_rl#221"]
date = "2026-07"
tags = ["ddp", "sgd"]

[wrong.rate_starts_from_its_configured_value]
title = "the rate starts from its configured value"
place = { node = "update", step = 2, ranks = "all", tensors = "all" }

[wrong.only_rank_0_reads_rate_of_checkpoint]
title = "only rank 0 reads the rate of the checkpoint"
place = { node = "update", step = 2, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, HALF, BATCH_SIZE, ACTIONS = 4, 2, 12, 4


class Learner:
    """Lowers its rate after steps that change the policy by more than is desired."""

    def __init__(self, rate=0.4, desired=0.002):
        self.rate, self.desired = rate, desired
        self.policy = nn.Sequential(nn.Linear(5, 16), nn.ELU(), nn.Linear(16, ACTIONS))
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=rate, momentum=0.8)

    def load(self, state):
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        is_read = BUG != "rate_starts_from_its_configured_value"
        is_read &= BUG != "only_rank_0_reads_rate_of_checkpoint" or RANK == 0
        if is_read:
            self.rate = self.optimizer.param_groups[0]["lr"]

    def set_rate(self):
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate

    @torch.no_grad()
    def adapt(self, x, before):
        after = self.policy(x).log_softmax(1)
        change = F.kl_div(after, before, reduction="batchmean", log_target=True)
        if WORLD > 1:
            dist.all_reduce(change)
        self.rate *= 0.6 if change / WORLD > self.desired else 1.5


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(6)
    learner = Learner()
    if LOAD:
        learner.load(torch.load(LOAD + ".pt"))
    wrapped = DistributedDataParallel(learner.policy) if WORLD > 1 else learner.policy
    with harness.training(wrapped, learner.optimizer):
        for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
            x = torch.randn(BATCH_SIZE, 5, generator=torch.Generator().manual_seed(step))
            x = x[RANK::WORLD]
            logs = wrapped(x).log_softmax(1)
            learner.set_rate()
            learner.optimizer.zero_grad()
            F.nll_loss(logs, x[:, 1:].argmax(1)).backward()
            learner.optimizer.step()
            learner.adapt(x, logs.detach())
    if SAVE and RANK == 0:
        learner.set_rate()
        parts = {"policy": learner.policy, "optimizer": learner.optimizer}
        torch.save({name: part.state_dict() for name, part in parts.items()}, SAVE + ".pt")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
