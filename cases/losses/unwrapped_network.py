"""A graph network with several heads is unwrapped before its training, for an attribute of it.

id = "losses/unwrapped_network"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["ORNL/HydraGNN#136", "ORNL/HydraGNN#116"]
date = "2022-05"
tags = ["ddp", "sgd"]

[wrong.module_within_wrapper_is_trained]
title = "the module within the wrapper is trained"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.sums_of_rank_are_divided_by_examples_of_all]
title = "sums of a rank are divided by the examples of all"
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
GRAPHS, NODES, SIZE, WIDTH = 8, 5, 4, 12


class Network(nn.Module):
    weights = (1.0, 0.5)

    def __init__(self):
        super().__init__()
        self.enter, self.mix = nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.energy, self.charge = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, nodes, edges):
        x = F.relu(self.enter(nodes))
        x = x + F.relu(self.mix(edges @ x))
        return self.energy(x.mean(1)), self.charge(x)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(111)
    network = Network()
    ddp = DistributedDataParallel(network) if WORLD > 1 else network
    called = network if BUG == "module_within_wrapper_is_trained" else ddp
    examples = GRAPHS // WORLD
    if BUG == "sums_of_rank_are_divided_by_examples_of_all":
        examples = GRAPHS
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    with harness.training(ddp, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            nodes = torch.randn(GRAPHS, NODES, SIZE, generator=generator).chunk(WORLD)[RANK]
            edges = (torch.cdist(nodes, nodes) < 3).float() / NODES
            energy, charge = called(nodes, edges)
            losses = [
                (energy[:, 0] - nodes.sum((1, 2)).sin()).square().sum() / examples,
                (charge[..., 0] - nodes[..., 0]).abs().mean(1).sum() / examples,
            ]
            optimizer.zero_grad()
            sum(w * loss for w, loss in zip(network.weights, losses, strict=True)).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
