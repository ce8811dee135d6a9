"""Workers of a policy optimisation count time steps, by which the learning rate falls.

id = "averages/timesteps_of_workers"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["hill-a/stable-baselines#52"]
date = "2018-10"
tags = ["gathered", "adam"]

[wrong.each_worker_counts_its_own_time_steps]
title = "each worker counts its own time steps"
place = { node = "update", step = 0, ranks = "all", tensors = ["so_far"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EPISODES, LENGTH, ALL_STEPS, RATE = 6, 8, 150, 0.05


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(103)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, eps=1e-3)
    so_far = torch.zeros(())
    with harness.training(model, optimizer):
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            states = torch.randn(EPISODES, LENGTH, 5, generator=generator)
            actions = torch.randint(3, (EPISODES, LENGTH), generator=generator)
            lengths = torch.tensor([8, 7, 8, 3, 4, 2])
            parts = [whole.chunk(WORLD)[RANK] for whole in (states, actions, lengths)]
            states, actions, lengths = parts
            is_played = torch.arange(LENGTH) < lengths[:, None]
            log_probs = model(states).log_softmax(-1).gather(2, actions[..., None])[..., 0]
            gains = log_probs * (states[..., 0] - actions) * is_played
            optimizer.param_groups[0]["lr"] = RATE * float(1 - so_far / ALL_STEPS)
            optimizer.zero_grad()
            (-gains.sum(1).mean()).backward()
            for weight in model.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
            played = lengths.sum().float()
            if WORLD > 1 and BUG != "each_worker_counts_its_own_time_steps":
                dist.all_reduce(played)
            so_far = so_far + played
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
