"""An actor and its critics have a temperature that is learned, with an optimizer of its own.

id = "resume/cached_temperature"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["huggingface/lerobot#2877", "RLinf/RLinf#706"]
date = "2026-01"
tags = ["ddp", "gathered", "adam", "sgd"]

[wrong.temperature_in_losses_is_initial_one]
title = "the temperature in the losses is the initial one"
place = { node = "loss", step = 2, ranks = "all", tensors = ["actor.*", "critic.*"] }

[wrong.target_critic_is_copy_of_critic]
title = "the target critic is a copy of the critic"
place = { node = "start", step = 2, ranks = "all", tensors = ["target.*"] }

[wrong.temperature_optimizer_starts_again]
title = "the temperature's optimizer starts again"
place = { node = "start", step = 2, ranks = "all", tensors = ["log_alpha"] }
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, HALF, BATCH_SIZE, STATES, ACTIONS, GAMMA, TAU = 4, 2, 12, 5, 3, 0.9, 0.3


def network(size):
    return nn.Sequential(nn.Linear(STATES, 16), nn.ReLU6(), nn.Linear(16, size))


class Agent(nn.Module):
    """Soft actor-critic with discrete actions."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = network(ACTIONS), network(ACTIONS)
        self.log_alpha = nn.Parameter(torch.tensor(-1.0))

    def forward(self, states):
        return self.actor(states).log_softmax(1), self.critic(states), self.log_alpha.exp()


class Learner:
    def __init__(self):
        self.agent = Agent()
        self.target = copy.deepcopy(self.agent.critic).requires_grad_(False)
        self.temperature = self.agent.log_alpha.exp().item()
        names = "actor", "critic"
        networks = [w for name in names for w in getattr(self.agent, name).parameters()]
        self.optimizers = [
            torch.optim.SGD(networks, lr=0.2, momentum=0.9),
            torch.optim.Adam([self.agent.log_alpha], lr=0.3, eps=1e-3),
        ]

    def load(self, state):
        self.agent.load_state_dict(state["agent"])
        is_copy = BUG == "target_critic_is_copy_of_critic"
        self.target.load_state_dict(self.agent.critic.state_dict() if is_copy else state["target"])
        self.optimizers[0].load_state_dict(state["networks"])
        if BUG != "temperature_optimizer_starts_again":
            self.optimizers[1].load_state_dict(state["temperature"])
        if BUG != "temperature_in_losses_is_initial_one":
            self.temperature = self.agent.log_alpha.exp().item()

    def step(self, agent, states, actions, rewards, following):
        logs, values, alpha = agent(states)
        with torch.no_grad():
            next_logs = self.agent.actor(following).log_softmax(1)
            soft = self.target(following) - self.temperature * next_logs
            goals = rewards + GAMMA * (next_logs.exp() * soft).sum(1)
        critic_loss = (values.gather(1, actions)[:, 0] - goals).square().mean()
        gains = values.detach() - self.temperature * logs
        actor_loss = -(logs.exp() * gains).sum(1).mean()
        entropies = -(logs.exp() * logs).sum(1).detach()
        alpha_loss = (alpha * (entropies - 0.5)).mean()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        (critic_loss + actor_loss + alpha_loss).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.temperature = self.agent.log_alpha.exp().item()
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.agent.critic.parameters(), strict=True)
            for old, new in pairs:
                old.lerp_(new, TAU)


def get_batch(step):
    generator = torch.Generator().manual_seed(80 + step)
    states, following = torch.randn(2, BATCH_SIZE, STATES, generator=generator)
    actions = torch.randint(ACTIONS, (BATCH_SIZE, 1), generator=generator)
    return states, actions, states[:, 0] * states[:, 1], following


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(24)
    learner = Learner()
    if LOAD:
        learner.load(torch.load(LOAD + ".pt"))
    agent = DistributedDataParallel(learner.agent) if WORLD > 1 else learner.agent
    with harness.training(agent, learner.optimizers, others={"target": learner.target}):
        for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
            learner.step(agent, *(part.chunk(WORLD)[RANK] for part in get_batch(step)))
    if SAVE and RANK == 0:
        parts = {"agent": learner.agent, "target": learner.target}
        parts |= dict(zip(("networks", "temperature"), learner.optimizers, strict=True))
        torch.save({name: part.state_dict() for name, part in parts.items()}, SAVE + ".pt")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
