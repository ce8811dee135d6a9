"""A graph network predicts a force for each atom; molecules of the ranks have more or fewer atoms.

id = "losses/atoms_of_replicas"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["facebookresearch/fairchem#269"]
date = "2021-09"
tags = ["ddp", "sgd"]

[wrong.each_rank_divides_by_its_own_atoms]
title = "each rank divides by its own atoms"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.each_rank_divides_by_all_atoms_and_ranks]
title = "each rank divides by all atoms, and ranks are averaged"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
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
MOLECULES, ATOMS, WIDTH = 8, 6, 16


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)
        self.message, self.self_loop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, places, edges):
        x = F.silu(self.enter(places))
        x = x + F.silu(edges @ self.message(x) + self.self_loop(x))
        return self.leave(x)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    places = torch.randn(MOLECULES, ATOMS, 3, generator=generator)
    numbers = torch.tensor([2, 3, 2, 3, 6, 5, 6, 6])
    is_atom = torch.arange(ATOMS) < numbers[:, None]
    places = places * is_atom[..., None]
    near = torch.cdist(places, places) < 2
    edges = (near & is_atom[:, :, None] & is_atom[:, None]).float() / 3
    forces = torch.tanh(edges @ places - places)
    return [whole.chunk(WORLD)[RANK] for whole in (places, edges, forces, is_atom)]


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(92)
    network = Network()
    ddp = DistributedDataParallel(network) if WORLD > 1 else network
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2, momentum=0.9)
    with harness.training(ddp, optimizer):
        for step in range(2):
            places, edges, forces, is_atom = batch(step)
            atoms = is_atom.sum().float()
            if WORLD > 1 and BUG != "each_rank_divides_by_its_own_atoms":
                dist.all_reduce(atoms)
                if BUG != "each_rank_divides_by_all_atoms_and_ranks":
                    atoms /= WORLD
            distances = torch.linalg.vector_norm(ddp(places, edges) - forces + 1e-6, dim=-1)
            optimizer.zero_grad()
            ((distances * is_atom).sum() / atoms).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
