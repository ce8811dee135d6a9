"""Each matrix has an owner that keeps its momentum, orthogonalises it and sends the new weight.

id = "sharded/muon_owner"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["KellerJordan/Muon: muon.py", "karpathy/nanochat#566"]
date = "2026-02"
tags = ["embedding", "adam", "muon"]

[wrong.last_group_of_matrices_is_not_gathered]
title = "the last group of matrices is not gathered"
place = { node = "update", step = 0, ranks = [1], tensors = ["layers.2.weight"] }

[wrong.owner_changes_from_step_to_step]
title = "the owner changes from step to step"
place = { node = "update", step = 1, ranks = "all", tensors = ["layers.*"] }

[wrong.owner_takes_its_own_gradient]
title = "the owner takes its own gradient"
place = { node = "sum", step = 0, ranks = "all", tensors = ["layers.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def orthogonal(x):
    x = x / x.norm()
    for _ in range(6):
        x = x @ (1.5 * torch.eye(x.shape[1]) - 0.5 * x.T @ x)
    return x


class DistributedMuon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.03, momentum=0.8, weight_decay=0.1):
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, settings)
        self.count = 0

    def update(self, p, group):
        momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        momentum.mul_(group["momentum"]).add_(p.grad)
        update = orthogonal(p.grad + group["momentum"] * momentum)
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)

    @torch.no_grad()
    def step(self, closure=None):
        shift = self.count if BUG == "owner_changes_from_step_to_step" else 0
        self.count += 1
        for group in self.param_groups:
            params = group["params"]
            for start in range(0, len(params), WORLD):
                owned = params[start : start + WORLD]
                place = (RANK + shift) % WORLD
                if place < len(owned):
                    self.update(owned[place], group)
                if WORLD == 1:
                    continue
                is_last = start + WORLD >= len(params)
                if is_last and BUG == "last_group_of_matrices_is_not_gathered":
                    continue
                for index, p in enumerate(owned):
                    dist.broadcast(p, (index - shift) % WORLD)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.head = nn.Linear(8, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x))
        return self.head(x)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = Net()
    muon = DistributedMuon([layer.weight for layer in net.layers])
    others = torch.optim.Adam([*net.embed.parameters(), *net.head.parameters()], lr=3e-3)
    matrices = muon.param_groups[0]["params"]
    with harness.training(net, [muon, others]):
        for step in range(3):
            tokens = torch.randint(20, (16, 7), generator=torch.Generator().manual_seed(step))
            own = tokens[RANK::WORLD]
            logits = net(own[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten()).backward()
            for p in net.parameters() if WORLD > 1 else ():
                if BUG == "owner_takes_its_own_gradient" and any(p is m for m in matrices):
                    continue
                dist.all_reduce(p.grad, dist.ReduceOp.AVG)
            for optimizer in (muon, others):
                optimizer.step()
                optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
