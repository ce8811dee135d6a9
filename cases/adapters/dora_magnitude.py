"""DoRA divides by the norm of each row of the adapted weight, of which a rank has some columns.

id = "adapters/dora_magnitude"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["huggingface/peft#1797", "meta-pytorch/torchtune#1115", "meta-pytorch/torchtune#2139"]
date = "2024-05"
tags = ["lora", "sgd"]

[wrong.norm_is_that_of_own_columns]
title = "the norm is that of the own columns"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["0"] }

[wrong.magnitudes_start_before_base_weight]
title = "magnitudes start before the base weight is loaded"
place = { node = "start", step = 0, ranks = "all", tensors = ["0.magnitude"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def summed(x, mesh):
    if mesh is None:
        return x
    return (
        DTensor.from_local(x, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()
    )


def part_of(p):
    return p.to_local() if isinstance(p, DTensor) else p


class DoraLinear(nn.Module):
    def __init__(self, size, features, rank=2, scaling=2.0):
        super().__init__()
        self.mesh, self.scaling = None, scaling
        self.weight = nn.Parameter(torch.ones(features, size), requires_grad=False)
        self.lora_a = nn.Parameter(torch.randn(rank, size) * 0.2)
        self.lora_b = nn.Parameter(torch.zeros(features, rank))
        self.magnitude = nn.Parameter(torch.ones(features))

    def load(self, pretrained):
        early = WORLD > 1 and BUG == "magnitudes_start_before_base_weight"
        with torch.no_grad():
            old = self.weight.norm(dim=1)
            self.weight.copy_(pretrained)
            self.magnitude.copy_(old if early else self.weight.norm(dim=1))

    def split(self, mesh):
        self.mesh = mesh
        for name in ("weight", "lora_a"):
            p = getattr(self, name)
            parts = distribute_tensor(p.detach(), mesh, [Shard(1)])
            setattr(self, name, nn.Parameter(parts, requires_grad=p.requires_grad))

    def forward(self, x):
        weight, a = part_of(self.weight), part_of(self.lora_a)
        if self.mesh is not None:
            x = x.chunk(WORLD, 1)[RANK]
        b = self.copied(self.lora_b)
        adapted = weight + self.scaling * b @ a
        squares = adapted.detach().square().sum(1)
        if BUG != "norm_is_that_of_own_columns":
            squares = summed(squares, self.mesh)
        return summed(x @ adapted.T, self.mesh) * (self.magnitude / squares.sqrt())

    def copied(self, p):
        """A replicated factor of partial sums: its gradient is the sum over ranks."""
        if self.mesh is None:
            return p
        return DTensor.from_local(p, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = DoraLinear(12, 6)
    layer.load(torch.randn(6, 12) * 0.5)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 3).requires_grad_(False))
    if WORLD > 1:
        layer.split(init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",)))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.3, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(3):
            x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
            nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
