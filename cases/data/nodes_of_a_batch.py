"""A batch of a graph has nodes to be classified, and neighbours that were drawn for them.

id = "data/nodes_of_a_batch"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pyg-team/pytorch_geometric#7931", "dmlc/dgl#2976"]
date = "2021-06"
tags = ["ddp"]

[wrong.neighbours_count_in_loss_too]
title = "neighbours count in the loss, too"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.labels_are_those_of_first_nodes_of_graph]
title = "labels are those of the first nodes of the graph"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }

[wrong.neighbours_are_drawn_from_nodes_of_rank]
title = "neighbours are drawn from the nodes of a rank"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
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
NODES, FEATURES, CLASSES, DRAWN, BATCH_SIZE = 60, 6, 4, 3, 16


class Graph:
    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(NODES, FEATURES, generator=generator)
        self.edges = torch.rand(NODES, NODES, generator=generator) < 0.3
        self.y = (self.x + self.edges.float() @ self.x / 9)[:, :CLASSES].argmax(1)

    def neighbours(self, node, seed):
        """Draws neighbours of a node, with replacement."""
        weights = self.edges[node].float()
        if WORLD > 1 and BUG == "neighbours_are_drawn_from_nodes_of_rank":
            weights = weights * (torch.arange(NODES) % WORLD == RANK)
        generator = torch.Generator().manual_seed(NODES * seed + node)
        return torch.multinomial(weights, DRAWN, True, generator=generator).tolist()


class Sage(nn.Module):
    """Nodes are (batch, node and neighbours, features); neighbours have none in the batch."""

    def __init__(self):
        super().__init__()
        self.own, self.others = nn.Linear(FEATURES, 18), nn.Linear(FEATURES, 18, bias=False)
        self.out = nn.Linear(18, CLASSES)

    def forward(self, x):
        means = torch.zeros_like(x)
        means[:, 0] = x[:, 1:].mean(1)
        return self.out(F.celu(self.own(x) + self.others(means)))


def main():
    torch.manual_seed(47)
    model, graph = Sage(), Graph()
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, eps=1e-3)
    with harness.training(model, optimizer):
        for step in range(2):
            seeds = torch.randperm(NODES, generator=torch.Generator().manual_seed(step))
            seeds = seeds[:BATCH_SIZE][RANK::WORLD].tolist()
            nodes = torch.tensor([[node, *graph.neighbours(node, step)] for node in seeds])
            labels = graph.y[nodes]
            if BUG == "labels_are_those_of_first_nodes_of_graph":
                labels[:, 0] = graph.y[: len(seeds)]
            number = 1 + DRAWN if BUG == "neighbours_count_in_loss_too" else 1
            logits = model(graph.x[nodes])[:, :number]
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), labels[:, :number].flatten()).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
