"""A batch of molecules is one graph: atoms have the number of their molecule, bonds those of atoms.

id = "losses/molecules_of_a_batch"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["ORNL/HydraGNN#116", "pyg-team/pytorch_geometric#7931"]
date = "2022-10"
tags = ["ddp", "adam"]

[wrong.loss_is_divided_by_ranks]
title = "the loss is divided by the number of ranks"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.energies_are_summed]
title = "errors of energies are summed"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.bonds_lead_to_atoms_of_first]
title = "bonds lead to atoms of the first molecule"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, FEATURES, WIDTH = 8, 5, 12


class Energies(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.norm = nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH)
        self.others, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, atoms, bonds, molecule):
        x = self.norm(self.own(atoms)).tanh()
        x = x + self.others(torch.zeros_like(x).index_add(0, bonds[1], x[bonds[0]]))
        sums = x.new_zeros(int(molecule.max()) + 1, WIDTH).index_add(0, molecule, x)
        return self.out(sums)[:, 0]


def batch(step):
    """Returns atoms, bonds and the energy of each molecule of a rank."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for number in range(BATCH_SIZE):
        atoms = torch.randn(4 + number % 3, FEATURES, generator=generator)
        bonds = torch.randint(len(atoms), (2, 8), generator=generator)
        found.append((atoms, bonds, atoms.square().mean()))
    return found[RANK::WORLD]


def main():
    torch.manual_seed(65)
    model = Energies()
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with harness.training(model, optimizer):
        for step in range(2):
            molecules = batch(step)
            sizes = torch.tensor([len(atoms) for atoms, *_ in molecules])
            starts = sizes.cumsum(0) - sizes
            if WORLD > 1 and BUG == "bonds_lead_to_atoms_of_first":
                starts = torch.zeros_like(starts)
            bonds = [own + start for (_, own, _), start in zip(molecules, starts, strict=True)]
            numbers = torch.arange(len(molecules)).repeat_interleave(sizes)
            atoms = torch.cat([own for own, *_ in molecules])
            made = model(atoms, torch.cat(bonds, 1), numbers)
            errors = (made - torch.stack([energy for *_, energy in molecules])).square()
            loss = errors.sum() if BUG == "energies_are_summed" else errors.mean()
            if BUG == "loss_is_divided_by_ranks":
                loss = loss / WORLD
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
