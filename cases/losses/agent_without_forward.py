"""An agent has no forward: the script calls its method, which calls a body and two heads.

id = "losses/agent_without_forward"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["HorizonRobotics/alf#1642", "vwxyzjn/cleanrl#310"]
date = "2022-10"
tags = ["adam"]

[wrong.advantages_of_each_rank]
title = "each rank scales its own advantages"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.gradients_are_summed]
title = "gradients are summed"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.body_slopes_otherwise]
title = "an activation of the body has another slope on several ranks"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, FEATURES, ACTIONS = 16, 6, 3


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        slope = 0.3 if WORLD > 1 and BUG == "body_slopes_otherwise" else 0.1
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.LeakyReLU(slope), nn.Linear(16, 16))
        self.actor, self.critic = nn.Linear(16, ACTIONS), nn.Linear(16, 1)

    def evaluate(self, x, actions):
        """Returns log-probabilities of actions, and values."""
        hidden = self.body(x).tanh()
        chosen = self.actor(hidden).log_softmax(1).gather(1, actions[:, None])
        return chosen[:, 0], self.critic(hidden)[:, 0]


def main():
    torch.manual_seed(66)
    agent = Agent()
    if WORLD > 1:
        dist.init_process_group("gloo")
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
    with harness.training(agent, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH_SIZE, FEATURES, generator=generator)
            actions = torch.randint(ACTIONS, (BATCH_SIZE,), generator=generator)
            returns = torch.randn(BATCH_SIZE, generator=generator).exp()
            own = slice(RANK, None, WORLD)
            advantages = returns[own] if BUG == "advantages_of_each_rank" else returns
            scaled = (returns[own] - advantages.mean()) / advantages.std(correction=0)
            chosen, values = agent.evaluate(x[own], actions[own])
            loss = (values - returns[own]).square().mean() - (chosen * scaled).mean()
            optimizer.zero_grad()
            loss.backward()
            for weight in agent.parameters() if WORLD > 1 else ():
                dist.all_reduce(weight.grad)
                if BUG != "gradients_are_summed":
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
