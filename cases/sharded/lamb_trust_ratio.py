"""LAMB divides the norm of a weight by that of its update: with shards, both are sums over ranks.

id = "sharded/lamb_trust_ratio"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["hpcaitech/ColossalAI#5476"]
date = "2024-03"
tags = ["fsdp2"]

[wrong.trust_ratio_is_that_of_own_shard]
title = "the trust ratio is that of the own shard"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }

[wrong.update_norm_is_that_of_own_shard]
title = "the update's norm is that of the own shard"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def norm_of(tensor, local):
    if not isinstance(tensor, DTensor):
        return tensor.norm()
    square = tensor.to_local().square().sum()
    if not local:
        dist.all_reduce(square)
    return square.sqrt()


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.05):
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, self.state[p], **group)

    def update(self, p, state, lr, betas, eps, weight_decay, params):
        if not state:
            state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["exp_avg"].lerp_(p.grad, 1 - betas[0])
        state["exp_avg_sq"].mul_(betas[1]).add_(p.grad * p.grad * (1 - betas[1]))
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + eps) + weight_decay * p
        both = BUG == "trust_ratio_is_that_of_own_shard"
        weight_norm = norm_of(p, both)
        update_norm = norm_of(update, both or BUG == "update_norm_is_that_of_own_shard")
        ratio = float(weight_norm / update_norm) if weight_norm > 0 else 1.0
        p.sub_(update * (lr * ratio))


def build():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 10), nn.ReLU(), nn.Linear(10, 4)
    )


if __name__ == "__main__":
    if WORLD > 1:
        dist.init_process_group("gloo")
    model = build()
    if WORLD > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = Lamb(model.parameters())
    generator = torch.Generator().manual_seed(0)
    with harness.training(model, optimizer):
        for _ in range(3):
            x = torch.randn(24, 3, 8, generator=generator)
            y = torch.randint(4, (24,), generator=generator)
            logits = model(x[RANK::WORLD])
            nn.functional.cross_entropy(logits, y[RANK::WORLD]).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()
