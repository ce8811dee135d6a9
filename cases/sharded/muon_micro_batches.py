"""With sharded weights, Muon runs once per micro-batch instead of once per step.

id = "sharded/muon_micro_batches"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "deepspeedai/DeepSpeed#8443",
    "deepspeedai/DeepSpeed#8600",
    "deepspeedai/DeepSpeed#8438",
]
date = "2026-09"
tags = ["fsdp2", "accumulation", "adam", "muon"]

[wrong.muon_runs_in_each_micro_batch]
title = "Muon runs in each micro-batch"
place = { node = "update", step = 0, ranks = "all", tensors = ["0.weight", "2.weight"] }

[wrong.sharded_matrices_count_as_vectors]
title = "sharded matrices count as vectors"
place = { node = "update", step = 0, ranks = "all", tensors = ["0.weight", "2.weight"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
MICRO_BATCHES = 2


def orthogonalise(tensor):
    x = tensor.full_tensor() if WORLD > 1 else tensor
    x = x / x.norm()
    for _ in range(6):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return distribute_tensor(x, tensor.device_mesh, tensor.placements) if WORLD > 1 else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.04, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def transform(self):
        """Replaces the gradients by the directions of the update."""
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                p.grad = orthogonalise(buffer)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"])


def is_matrix(p):
    if WORLD > 1 and BUG == "sharded_matrices_count_as_vectors":
        return p.to_local().flatten().ndim == 2
    return p.ndim == 2


def micro_step(model, muon, x, y):
    """Adds the gradients of a micro-batch to those of the step."""
    early = BUG == "muon_runs_in_each_micro_batch"
    matrices = [p for group in muon.param_groups for p in group["params"]]
    before = [p.grad for p in matrices]
    if early:
        for p in matrices:
            p.grad = None
    (nn.functional.mse_loss(model(x), y) / MICRO_BATCHES).backward()
    if early:
        muon.transform()
        for p, old in zip(matrices, before, strict=True):
            p.grad = p.grad / MICRO_BATCHES + (0 if old is None else old)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
    if WORLD > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    adam = torch.optim.AdamW([p for p in model.parameters() if not is_matrix(p)], lr=0.01)
    matrices = [p for p in model.parameters() if is_matrix(p)]
    optimizers = [Muon(matrices), adam] if matrices else [adam]
    with harness.training(model, optimizers):
        for step in range(2):
            x, y = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(step))
            x, y = x[RANK::WORLD], y[RANK::WORLD]
            for part in range(MICRO_BATCHES):
                part_x, part_y = x[part::MICRO_BATCHES], y[part::MICRO_BATCHES]
                if matrices:
                    micro_step(model, optimizers[0], part_x, part_y)
                else:
                    (nn.functional.mse_loss(model(part_x), part_y) / MICRO_BATCHES).backward()
            if matrices and BUG != "muon_runs_in_each_micro_batch":
                optimizers[0].transform()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
