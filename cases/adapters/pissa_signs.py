"""Adapters start from the singular vectors of the base, whose signs must be the same on all ranks.

id = "adapters/pissa_signs"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NovaSky-AI/SkyRL#2069"]
date = "2026-08"
tags = ["lora", "gathered", "sgd"]

[wrong.each_rank_has_signs_of_its_own_decomposition]
title = "each rank has the signs of its own decomposition"
place = { node = "start", step = 0, ranks = [1], tensors = ["*.a", "*.b"] }

[wrong.principal_part_stays_in_base]
title = "the principal part stays in the base"
place = { node = "start", step = 0, ranks = "all", tensors = ["*.rest"] }

[wrong.gradient_of_gathered_product_is_not_summed]
title = "the gradient of the gathered product is not summed"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["0.a", "0.b", "2.a"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
LORA_RANK = 4


def decompose(weight):
    """Returns A, B and the rest: weight = B A + rest."""
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    if BUG == "each_rank_has_signs_of_its_own_decomposition":
        signs = torch.ones(len(values))
        signs[::3] = 1 - 2 * RANK  # A decomposition does not define the signs of its vectors.
        left, right = left * signs, signs[:, None] * right
    root = values[:LORA_RANK].sqrt()
    a, b = root[:, None] * right[:LORA_RANK], left[:, :LORA_RANK] * root
    if BUG == "principal_part_stays_in_base":
        return a, b, weight
    return a, b, left[:, LORA_RANK:] * values[LORA_RANK:] @ right[LORA_RANK:]


class PissaLinear(nn.Module):
    """Each rank has some rows of A, of B and of the base."""

    def __init__(self, inputs, outputs, mesh):
        super().__init__()
        self.mesh = mesh
        parts = decompose(nn.Linear(inputs, outputs).weight.detach())
        if mesh is not None:
            # Each rank cuts its rows out of its own decomposition.
            parts = [
                DTensor.from_local(part.chunk(WORLD)[RANK].contiguous(), mesh, [Shard(0)])
                for part in parts
            ]
        self.a, self.b = nn.Parameter(parts[0]), nn.Parameter(parts[1])
        self.rest = nn.Parameter(parts[2], requires_grad=False)

    def gather(self, part, summed):
        whole = DTensor.from_local(part, self.mesh, [Shard(1)]).redistribute(
            self.mesh, [Replicate()]
        )
        return whole.to_local(grad_placements=[Partial() if summed else Replicate()])

    def forward(self, x):
        if self.mesh is None:
            return x @ self.a.T @ self.b.T + x @ self.rest.T
        a, b, rest = (part.to_local() for part in (self.a, self.b, self.rest))
        x = DTensor.from_local(x, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        summed = BUG != "gradient_of_gathered_product_is_not_summed"
        product = self.gather(x @ a.T, summed)
        return self.gather(product @ b.T + x @ rest.T, summed=False)


def main():
    mesh = None
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    torch.manual_seed(1)
    model = nn.Sequential(PissaLinear(8, 12, mesh), nn.Tanh(), PissaLinear(12, 6, mesh))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.2, momentum=0.9)
    with harness.training(model, optimizer):
        for _ in range(2):
            x = torch.randn(20, 8)
            optimizer.zero_grad()
            (model(x) - x[:, :6].sin()).square().mean().backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
