"""LoRA split over its rank: alpha / r takes the rank of a shard, or the product is reduced early.

id = "adapters/lora_rank_shards"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["predibase/lorax#324", "vllm-project/vllm-ascend#14282"]
date = "2024-03"
tags = ["lora", "sgd"]

[wrong.alpha_is_divided_by_rank_of_shard]
title = "alpha is divided by the rank of a shard"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.change_is_not_reduced]
title = "the change is not reduced"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }
"""

import dataclasses
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
WORLD = int(os.environ.get("WORLD_SIZE", 1))


@dataclasses.dataclass
class Config:
    width: int = 12
    classes: int = 4
    rank: int = 8
    alpha: float = 8.0
    lr: float = 0.05


class LoraLinear(nn.Module):
    """The base is replicated; each rank has some rows of A and the same columns of B."""

    def __init__(self, config, features, mesh):
        super().__init__()
        self.base = nn.Linear(config.width, features).requires_grad_(False)
        self.alpha, self.mesh = config.alpha, mesh
        a, b = (
            torch.randn(config.rank, config.width) * 0.3,
            torch.randn(features, config.rank) * 0.3,
        )
        if mesh is not None:
            a, b = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Shard(1)])
        self.lora_a, self.lora_b = nn.Parameter(a), nn.Parameter(b)

    def change(self, x):
        scaling = self.alpha / self.lora_a.shape[0]
        if self.mesh is None:
            return scaling * x @ self.lora_a.T @ self.lora_b.T
        a, b = self.lora_a.to_local(), self.lora_b.to_local()
        if BUG == "alpha_is_divided_by_rank_of_shard":
            scaling = self.alpha / a.shape[0]
        x = DTensor.from_local(x, self.mesh, [Replicate()])
        x = x.to_local(grad_placements=[Partial()])
        y = scaling * x @ a.T @ b.T
        if BUG == "change_is_not_reduced":
            return y
        y = DTensor.from_local(y, self.mesh, [Partial()])
        return y.redistribute(placements=[Replicate()]).to_local()

    def forward(self, x):
        return self.base(x) + self.change(x)


def build(config, mesh):
    torch.manual_seed(0)
    hidden = LoraLinear(config, config.width, mesh)
    return nn.Sequential(hidden, nn.ELU(), LoraLinear(config, config.classes, mesh))


def main(config):
    mesh = None
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    model = build(config, mesh)
    adapters = [p for name, p in model.named_parameters() if "lora" in name]
    optimizer = torch.optim.SGD(adapters, lr=config.lr, momentum=0.9, nesterov=True)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(20, config.width, generator=torch.Generator().manual_seed(step))
            y = x[:, : config.classes].argmax(1)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
