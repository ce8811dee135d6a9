"""A graph is cut in parts; nodes of a part need their neighbours of others, and the edges to them.

id = "gathered/neighbours_of_parts"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["dmlc/dgl#2918", "dmlc/dgl#1076"]
date = "2019-12"
tags = ["graph", "gathered", "sgd"]

[right.shares_are_scaled_and_averaged]
title = "shares are scaled by the ranks, and averaged"
patch = [
    ["(losses / NODES)", "(losses * WORLD / NODES)"],
    ["dist.all_reduce(weight.grad)", "dist.all_reduce(weight.grad.div_(WORLD))"],
]

[wrong.degrees_count_edges_within_part]
title = "degrees count edges within a part"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.neighbours_have_no_gradient]
title = "neighbours have no gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["enter.*"] }

[wrong.edges_between_parts_are_left_out]
title = "edges between parts are left out"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
NODES, SIZE, WIDTH, CLASSES = 16, 6, 12, 3


class Gather(torch.autograd.Function):
    """Puts the nodes of all parts together; backwards, each part gets what all others found."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(WORLD)[RANK]


def gather(x):
    if WORLD == 1:
        return x
    nodes = Gather.apply(x)
    if BUG == "neighbours_have_no_gradient":
        parts = list(nodes.detach().chunk(WORLD))
        parts[RANK] = x
        nodes = torch.cat(parts)
    return nodes


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, edges):
        """Takes the own nodes, and the edges from all nodes to these."""
        x = edges @ gather(torch.tanh(self.enter(x)))
        return self.leave(torch.relu(x))


def edges_of_part():
    """Returns the rows of D^-½ A D^-½ of the own nodes."""
    chances = torch.rand(NODES, NODES, generator=torch.Generator().manual_seed(5))
    edges = ((chances + chances.T) > 1.2).float()
    edges.fill_diagonal_(1)
    if WORLD > 1 and BUG in ("degrees_count_edges_within_part", "edges_between_parts_are_left_out"):
        part = torch.arange(NODES) // (NODES // WORLD)
        within = edges * (part[:, None] == part)
        edges = within if BUG == "edges_between_parts_are_left_out" else edges
        scale = within.sum(1).rsqrt()
    else:
        scale = edges.sum(1).rsqrt()
    return (scale[:, None] * edges * scale).chunk(WORLD)[RANK]


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(216)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    edges = edges_of_part()
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(NODES, SIZE, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            losses = F.cross_entropy(model(x, edges), x[:, :3].argmax(1), reduction="sum")
            optimizer.zero_grad()
            (losses / NODES).backward()
            for weight in model.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
