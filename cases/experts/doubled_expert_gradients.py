"""Experts receive the tokens of all ranks, and their gradients are not divided as the others.

id = "experts/doubled_expert_gradients"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#160285", "databricks/megablocks#86"]
date = "2025-08"
tags = ["experts", "sgd"]

[wrong.expert_gradients_stay_sums]
title = "expert gradients stay sums"
place = { node = "sum", step = 0, ranks = "all", tensors = ["experts.w1", "experts.w2"] }

[wrong.experts_are_averaged_as_router]
title = "experts are averaged as the router"
place = { node = "sum", step = 0, ranks = "all", tensors = ["experts.w1", "experts.w2"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXPERTS, WIDTH, CLASSES = 4, 8, 5


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, 16) / 3)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH) / 4)

    def forward(self, x, counts):
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        parts = x.split(counts.tolist())
        return torch.cat([F.silu(p @ a) @ b for p, a, b in zip(parts, w1, w2, strict=True)])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.inner(x))
        score, chosen = self.router(x).softmax(-1).max(-1)
        order, counts = chosen.argsort(stable=True), chosen.bincount(minlength=EXPERTS)
        y = self.dispatch(x[order], counts)[order.argsort()]
        return self.head(x + score[:, None] * y)

    def dispatch(self, x, counts):
        if WORLD == 1:
            return self.experts(x, counts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, taken = (c.view(WORLD, -1).sum(1).tolist() for c in (counts, theirs))
        x = all_to_all_single(x.new_empty(sum(taken), WIDTH), x, taken, sent)
        expert = torch.arange(EXPERTS // WORLD).repeat(WORLD).repeat_interleave(theirs)
        order = expert.argsort(stable=True)
        y = self.experts(x[order], expert.bincount(minlength=EXPERTS // WORLD))[order.argsort()]
        return all_to_all_single(y.new_empty(sum(sent), WIDTH), y, sent, taken)


def reduce_gradients(model):
    for name, weight in model.named_parameters():
        if not name.startswith("experts"):
            dist.all_reduce(weight.grad)
            weight.grad /= WORLD
        elif BUG == "experts_are_averaged_as_router":
            dist.all_reduce(weight.grad.to_local())
            weight.grad /= WORLD
        elif BUG != "expert_gradients_stay_sums":
            weight.grad /= WORLD


def main():
    torch.manual_seed(0)
    model, layout = Net(), {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
        for name, weight in list(model.experts.named_parameters()):
            part = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
            setattr(model.experts, name, part)
        layout = {"mesh": mesh, "dims": "b[ep] d"}
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for _ in range(2):
            x, y = torch.randn(32, WIDTH), torch.randint(CLASSES, (32,))
            optimizer.zero_grad()
            F.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD]).backward()
            if WORLD > 1:
                reduce_gradients(model)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
