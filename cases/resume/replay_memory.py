"""An agent learns from a memory of what it has seen, which a checkpoint of its weights lacks.

id = "resume/replay_memory"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["nicklashansen/tdmpc2#28", "thu-ml/tianshou#500", "ray-project/ray#8151"]
date = "2020-04"
tags = ["ddp", "gathered", "adam"]

[wrong.memory_is_empty_after_load]
title = "the memory is empty after the load"
place = { node = "examples", step = 2, ranks = "all", tensors = "all" }

[wrong.only_rank_0_loads_its_memory]
title = "only rank 0 loads its memory"
place = { node = "examples", step = 2, ranks = [1], tensors = "all" }

[wrong.places_in_memory_are_drawn_as_at_start]
title = "places in the memory are drawn as at the start"
place = { node = "examples", step = 2, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, HALF, WORLDS, NEW, SAMPLES, SIZE, ACTIONS, DISCOUNT = 4, 2, 4, 6, 3, 5, 3, 0.9


class Memory:
    """Keeps what was seen in one of the simulated worlds, and draws from it."""

    def __init__(self, world):
        self.world, self.rows = world, torch.zeros(0, 2 * SIZE + 2)
        self.generator = torch.Generator().manual_seed(world)

    def add(self, step):
        generator = torch.Generator().manual_seed(100 * step + self.world)
        states = torch.randn(NEW + 1, SIZE, generator=generator)
        actions = torch.randint(ACTIONS, (NEW, 1), generator=generator)
        rewards = states[:-1].gather(1, actions)
        rows = torch.cat([states[:-1], actions, rewards, states[1:]], 1)
        self.rows = torch.cat([self.rows, rows])

    def draw(self):
        return self.rows[torch.randint(len(self.rows), (SAMPLES,), generator=self.generator)]

    def load(self, state):
        is_lost = BUG == "memory_is_empty_after_load"
        is_lost |= BUG == "only_rank_0_loads_its_memory" and RANK > 0
        if not is_lost:
            self.rows = state["rows"]
        if BUG != "places_in_memory_are_drawn_as_at_start":
            self.generator.set_state(state["generator"])


def loss_of(model, network, rows):
    """Compares values of actions with rewards and the values of what follows."""
    states, actions, rewards, following = rows.split([SIZE, 1, 1, SIZE], 1)
    with torch.no_grad():
        targets = rewards + DISCOUNT * network(following).max(1, keepdim=True).values
    return nn.functional.smooth_l1_loss(model(states).gather(1, actions.long()), targets)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(SIZE, 16), nn.Tanh(), nn.Linear(16, ACTIONS))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02, eps=1e-3)
    memories = [Memory(world) for world in range(WORLDS)[RANK * WORLDS // WORLD :]]
    memories = memories[: WORLDS // WORLD]
    if LOAD:
        state = torch.load(f"{LOAD}.{RANK}.pt")
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        for memory, own in zip(memories, state["memories"], strict=True):
            memory.load(own)
    model = DistributedDataParallel(network) if WORLD > 1 else network
    with harness.training(model, optimizer):
        for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
            for memory in memories:
                memory.add(step)
            loss = loss_of(model, network, torch.cat([memory.draw() for memory in memories]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if SAVE:
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
        state["memories"] = [
            {"rows": memory.rows, "generator": memory.generator.get_state()} for memory in memories
        ]
        torch.save(state, f"{SAVE}.{RANK}.pt")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
