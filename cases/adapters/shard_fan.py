"""The first factor of a LoRA layer is split, and its initialiser looks at the width of a part.

id = "adapters/shard_fan"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA-NeMo/Megatron-Bridge#5840", "NVIDIA-NeMo/Megatron-Bridge#5843"]
date = "2026-08"
tags = ["tensor_parallel", "lora"]

[wrong.deviation_is_that_of_width_of_part]
title = "the deviation is that of the width of a part"
place = { node = "start", step = 0, ranks = "all", tensors = ["*.a"] }

[wrong.first_layer_has_deviation_of_part]
title = "the first layer has the deviation of a part"
place = { node = "start", step = 0, ranks = "all", tensors = ["0.a"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH, LORA_RANK, ALPHA = 24, 4, 8


class RowParallel(nn.Module):
    """Each rank has some columns of the frozen weight and of A; B is a copy on each."""

    def __init__(self, outputs, mesh, is_first=False):
        super().__init__()
        sees_part = BUG == "deviation_is_that_of_width_of_part"
        sees_part |= BUG == "first_layer_has_deviation_of_part" and is_first
        width = WIDTH // WORLD if sees_part else WIDTH
        weight = torch.randn(outputs, WIDTH) / WIDTH**0.5
        a = torch.randn(LORA_RANK, WIDTH) * (2 / (width + LORA_RANK)) ** 0.5  # Xavier.
        b = torch.randn(outputs, LORA_RANK) * 0.2
        if mesh is not None:
            weight, a = (distribute_tensor(each, mesh, [Shard(1)]) for each in (weight, a))
            b = distribute_tensor(b, mesh, [Replicate()])
        self.mesh = mesh
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)

    def forward(self, x):
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        y, small = F.linear(x, self.weight), F.linear(x, self.a)
        if self.mesh is not None:
            y, small = (each.redistribute(placements=[Replicate()]) for each in (y, small))
        y = y + ALPHA / LORA_RANK * F.linear(small, self.b)
        return y.to_local() if self.mesh is not None else y


def main():
    mesh = None
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    torch.manual_seed(11)
    layers = RowParallel(WIDTH, mesh, is_first=True), nn.Mish(), RowParallel(3, mesh)
    model = nn.Sequential(*layers)
    adapters = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.RMSprop(adapters, lr=0.01, alpha=0.9, eps=1e-3)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
            F.huber_loss(model(x), x[:, :3] * x[:, 3:6], delta=0.5).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
