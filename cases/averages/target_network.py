"""Q-learning: each rank has a target network of its own, or updates it wrongly.

id = "averages/target_network"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["vwxyzjn/cleanrl#476", "ray-project/ray#45614"]
date = "2024-05"
tags = ["ddp", "gathered", "adam"]

[wrong.target_is_not_copy]
title = "the target is not a copy"
place = { node = "start", step = 0, ranks = "all", tensors = ["target.*"] }

[wrong.tau_counts_once_per_rank]
title = "tau counts once per rank"
place = { node = "update", step = 0, ranks = "all", tensors = ["target.*"] }

[wrong.bootstrap_uses_online_network]
title = "the bootstrap uses the online network"
place = { node = "loss", step = 1, ranks = "all", tensors = "all" }
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
STATES, ACTIONS, TAU, GAMMA = 6, 3, 0.2, 0.9


class QNetwork(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(STATES, 24), nn.ReLU(), nn.Linear(24, ACTIONS))


class Agent:
    def __init__(self):
        torch.manual_seed(0)
        self.net = QNetwork()
        torch.manual_seed(100 + RANK)
        self.target = QNetwork().requires_grad_(False)
        if BUG != "target_is_not_copy":
            self.target.load_state_dict(self.net.state_dict())
        self.online = DistributedDataParallel(self.net) if WORLD > 1 else self.net
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=3e-3)

    def learn(self, state, action, reward, following):
        with torch.no_grad():
            target = self.net if BUG == "bootstrap_uses_online_network" else self.target
            goal = reward + GAMMA * target(following).amax(-1)
        value = self.online(state).gather(-1, action[:, None])[:, 0]
        self.optimizer.zero_grad()
        F.smooth_l1_loss(value, goal).backward()
        self.optimizer.step()
        for _ in range(WORLD if BUG == "tau_counts_once_per_rank" else 1):
            self.follow()

    @torch.no_grad()
    def follow(self):
        for mean, weight in zip(self.target.parameters(), self.net.parameters(), strict=True):
            mean.copy_(TAU * weight + (1 - TAU) * mean)


def transitions(steps, size=32):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        state = torch.randn(size, STATES, generator=generator)
        action = torch.randint(ACTIONS, (size,), generator=generator)
        reward = 3 * state[torch.arange(size), action]
        batch = state, action, reward, state.roll(1, -1)
        yield [part[RANK::WORLD] for part in batch]


if __name__ == "__main__":
    if WORLD > 1:
        dist.init_process_group("gloo")
    agent = Agent()
    with harness.training(agent.online, agent.optimizer, others={"target": agent.target}):
        for batch in transitions(3):
            agent.learn(*batch)
    if WORLD > 1:
        dist.destroy_process_group()
