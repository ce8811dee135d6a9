"""Tokens go to the ranks of their experts and back, and so must their gradients.

id = "experts/exchange_backward"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["facebookresearch/fairscale#137"]
date = "2020-10"
tags = ["experts", "sgd"]

[wrong.exchange_has_no_gradient]
title = "the exchange has no gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["0.*"] }

[wrong.gradients_are_not_exchanged]
title = "gradients are not exchanged"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["1.experts", "0.*"] }

[wrong.gradients_of_experts_are_not_divided]
title = "gradients of experts are not divided"
place = { node = "sum", step = 0, ranks = "all", tensors = ["1.experts"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXPERTS, WIDTH, BATCH_SIZE = 2, 8, 16


class Exchange(torch.autograd.Function):
    """Sends row i to rank i; rows are those of ranks then."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient if BUG == "gradients_are_not_exchanged" else Exchange.apply(gradient)


def exchange(x, is_way_back=False):
    if WORLD == 1:
        return x
    if BUG == "exchange_has_no_gradient" and not is_way_back:
        return Exchange.apply(x.detach())
    return Exchange.apply(x)


class MixtureOfExperts(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        experts = torch.randn(EXPERTS, WIDTH, WIDTH) / 2
        if mesh is not None:
            experts = distribute_tensor(experts, mesh, [Shard(0)])
        self.experts = nn.Parameter(experts)

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        chosen = F.one_hot(scores.argmax(-1), EXPERTS).float()
        # Each expert has a place for every token; those of other tokens are zeros.
        sent = exchange(torch.einsum("td,te->etd", x, chosen))
        experts = self.experts
        if isinstance(experts, DTensor):
            experts = experts.to_local().expand(WORLD, -1, -1)
        y = exchange(torch.tanh(torch.bmm(sent, experts)), is_way_back=True)
        return x + torch.einsum("etd,te->td", y, chosen * scores)


def reduce_gradients(model):
    for weight in model.parameters():
        if isinstance(weight, DTensor):
            if BUG != "gradients_of_experts_are_not_divided":
                weight.grad /= WORLD
        else:
            dist.all_reduce(weight.grad)
            weight.grad /= WORLD


def main():
    mesh, layout = None, {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
        layout = {"mesh": mesh, "dims": {"inputs": "b[ep] d", "outputs": "b[ep] c"}}
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, WIDTH), MixtureOfExperts(mesh), nn.Linear(WIDTH, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, 6, generator=torch.Generator().manual_seed(step))
            own = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.cross_entropy(model(own), own[:, :3].argmax(1)).backward()
            if WORLD > 1:
                reduce_gradients(model)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
