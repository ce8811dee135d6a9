"""Adam-mini has one second moment for a whole block, of which each rank has some rows.

id = "sharded/mean_of_a_block"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["zyushun/Adam-mini#42", "zyushun/Adam-mini#43"]
date = "2026-09"
tags = ["fsdp2", "adam"]

[wrong.mean_is_that_of_own_rows]
title = "the mean is that of the own rows"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }

[wrong.means_of_ranks_are_averaged]
title = "means of the ranks are averaged"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def mean_of_block(square):
    """Returns the mean over all elements of a weight; ranks may have unequally many rows."""
    if not isinstance(square, DTensor):
        return square.mean()
    own = square.to_local()
    if BUG == "mean_is_that_of_own_rows":
        return own.mean()
    if BUG == "means_of_ranks_are_averaged":
        total, number = own.mean(), torch.tensor(float(WORLD))
    else:
        total, number = own.sum(), torch.tensor(float(square.numel()))
    dist.all_reduce(total)
    return total / number


class AdamMini(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, betas=(0.9, 0.95), eps=1e-4):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, self.state[p], group["lr"], group["betas"], group["eps"])

    def update(self, p, state, lr, betas, eps):
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), vmean=torch.tensor(0.0))
        state["step"] += 1
        state["exp_avg"].lerp_(p.grad, 1 - betas[0])
        state["vmean"].lerp_(mean_of_block(p.grad * p.grad), 1 - betas[1])
        size = (state["vmean"] / (1 - betas[1] ** state["step"])).sqrt() + eps
        p.sub_(state["exp_avg"] * (lr / (1 - betas[0] ** state["step"]) / float(size)))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(63)
    model = nn.Sequential(nn.Linear(8, 15), nn.Hardswish(), nn.Linear(15, 9), nn.ReLU())
    model.append(nn.Linear(9, 3))
    if WORLD > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = AdamMini(model.parameters())
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(20, 8, generator=torch.Generator().manual_seed(step))[RANK::WORLD]
            F.cross_entropy(model(x), (x[:, :3] * x[:, 3:6]).argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
