"""The weight of a divergence penalty adapts during the training, and is no part of the checkpoint.

id = "resume/divergence_weight"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["verl-project/verl#2653", "ray-project/ray#22444"]
date = "2022-02"
tags = ["sgd"]

[wrong.weight_starts_again]
title = "the weight starts again"
place = { node = "loss", step = 2, ranks = "all", tensors = "all" }

[wrong.only_rank_0_restores_weight]
title = "only rank 0 restores the weight"
place = { node = "loss", step = 2, ranks = [1], tensors = "all" }
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, HALF, BATCH_SIZE, ACTIONS = 4, 2, 16, 5


class Controller:
    """Raises the weight of the penalty while the divergence is above its target."""

    def __init__(self, weight=0.2, target=0.01):
        self.weight, self.target = weight, target

    def update(self, divergence):
        if WORLD > 1:
            dist.all_reduce(divergence)
        error = float(divergence) / WORLD / self.target - 1
        self.weight *= 1 + max(-0.8, min(0.8, error))


def load(policy, optimizer, controller):
    state = torch.load(LOAD + ".pt")
    policy.load_state_dict(state["policy"])
    optimizer.load_state_dict(state["optimizer"])
    if BUG == "weight_starts_again":
        return
    if BUG != "only_rank_0_restores_weight" or RANK == 0:
        controller.weight = state["weight"]


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    policy = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, ACTIONS))
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5, momentum=0.5)
    controller = Controller()
    if LOAD:
        load(policy, optimizer, controller)
    with harness.training(policy, optimizer):
        for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
            x = torch.randn(BATCH_SIZE, 6, generator=torch.Generator().manual_seed(step))
            x = x[RANK::WORLD]
            logs, before = policy(x).log_softmax(1), reference(x).log_softmax(1)
            divergence = F.kl_div(before, logs, reduction="batchmean", log_target=True)
            rewards = x[:, :ACTIONS] + 0.5
            loss = controller.weight * divergence - (logs.exp() * rewards).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            for weight in policy.parameters() if WORLD > 1 else ():
                dist.all_reduce(weight.grad)
                weight.grad /= WORLD
            optimizer.step()
            controller.update(divergence.detach())
    if SAVE and RANK == 0:
        state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "weight": controller.weight}, SAVE + ".pt")
    if WORLD > 1:
        dist.destroy_process_group()


main()
