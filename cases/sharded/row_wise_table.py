"""Rows of a table of embeddings are split over ranks, whose losses are parts of one sum.

id = "sharded/row_wise_table"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["meta-pytorch/torchrec#2251"]
date = "2024-07"
tags = ["gathered", "sgd"]

[wrong.gradients_of_table_are_divided_by_ranks]
title = "gradients of the table are divided by the ranks"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["table.weight"] }

[wrong.gradients_of_all_other_weights_are_divided]
title = "gradients of all other weights are divided"
place = { node = "sum", step = 0, ranks = "all", tensors = ["over.*"] }

[wrong.only_own_examples_reach_rows]
title = "only own examples reach the rows"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["table.weight"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ROWS, WIDTH, FEATURES, BATCH_SIZE = 20, 6, 5, 16


class RowsOfAll(torch.autograd.Function):
    """Adds the rows that the ranks have, and takes the own examples."""

    @staticmethod
    def forward(ctx, rows):
        rows = rows.clone()
        dist.all_reduce(rows)
        return rows.chunk(WORLD)[RANK].clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        parts = [torch.zeros_like(gradient) for _ in range(WORLD)]
        if BUG == "only_own_examples_reach_rows":
            parts[RANK] = gradient
        else:
            dist.all_gather(parts, gradient)
        if BUG == "gradients_of_table_are_divided_by_ranks":
            parts = [part / WORLD for part in parts]
        return torch.cat(parts)


class Table(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        weight = torch.randn(ROWS, WIDTH)
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]) if mesh else weight)

    def forward(self, ids):
        """Returns the sum of the rows of each example."""
        if not isinstance(self.weight, DTensor):
            return F.embedding(ids, self.weight).sum(1)
        weight = self.weight.to_local()
        everything = [torch.empty_like(ids) for _ in range(WORLD)]
        dist.all_gather(everything, ids.contiguous())
        places = torch.cat(everything) - RANK * len(weight)
        is_own = (places >= 0) & (places < len(weight))
        rows = F.embedding(places.clamp(0, len(weight) - 1), weight) * is_own.unsqueeze(2)
        return RowsOfAll.apply(rows.sum(1))


class Ranker(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.table = Table(mesh)
        self.over = nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, ids):
        return self.over(self.table(ids)).squeeze(1)


def main():
    mesh, layout = None, {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
        layout = {"mesh": mesh, "dims": {"inputs": "b[dp] f", "outputs": "b[dp]"}}
    torch.manual_seed(26)
    model = Ranker(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(ROWS, (BATCH_SIZE, FEATURES), generator=generator)
            ids = ids.chunk(WORLD)[RANK]
            clicked = (ids.sum(1) % 3 == 0).float()
            losses = F.binary_cross_entropy_with_logits(model(ids), clicked, reduction="sum")
            optimizer.zero_grad()
            (losses / BATCH_SIZE).backward()
            for weight in model.over.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                if BUG == "gradients_of_all_other_weights_are_divided":
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
