"""FSDP2: each layer and the model are sharded, gradients are clipped by their global norm."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cases import harness
from cases.programs.launch import DEVICE, start

GLOBAL_BATCH_SIZE, MAX_NORM = 8, 0.2
POLICY = MixedPrecisionPolicy()


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 12), nn.SiLU(), nn.Linear(12, width))

    def forward(self, x):
        return x + self.feed_forward(self.norm(x))


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.output = nn.Linear(width, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def batch(step, rank, world_size):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(GLOBAL_BATCH_SIZE, 6, generator=generator)
    y = torch.randint(3, (GLOBAL_BATCH_SIZE,), generator=generator)
    return x.chunk(world_size)[rank], y.chunk(world_size)[rank]


def shard(model, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)


def main(rank, world_size):
    torch.manual_seed(0)
    model = Model()
    if world_size > 1:
        shard(model, world_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-6)
    with harness.training(model, optimizer):
        for step in range(3):
            x, y = batch(step, rank, world_size)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    start(main)
