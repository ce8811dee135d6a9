"""The outputs of the routed experts are scaled by a factor, in the router or after the experts.

id = "experts/scaling_factor"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["sgl-project/sglang#8511", "vllm-project/vllm#45037"]
date = "2025-07"
tags = ["experts", "sgd"]

[wrong.factor_is_applied_in_both_places]
title = "the factor is applied in both places"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["1"] }

[wrong.factor_scales_shared_expert_too]
title = "the factor scales the shared expert, too"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["1"] }

[wrong.only_rank_0_applies_factor]
title = "only rank 0 applies the factor"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["1"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXPERTS, TOP, WIDTH, FACTOR = 4, 2, 8, 2.5


class MixtureOfExperts(nn.Module):
    """Each rank computes its experts for all tokens."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.shared = nn.Linear(WIDTH, WIDTH)
        experts = torch.randn(EXPERTS, WIDTH, WIDTH) / 3
        if mesh is not None:
            experts = distribute_tensor(experts, mesh, [Shard(0)])
        self.experts = nn.Parameter(experts)

    def route(self, x):
        scores, chosen = self.router(x).sigmoid().topk(TOP)
        scores = scores / scores.sum(-1, keepdim=True)
        if BUG == "factor_is_applied_in_both_places":
            scores = scores * FACTOR
        return torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, chosen, scores)

    def copy_to_ranks(self, x):
        if self.mesh is None:
            return x
        x = DTensor.from_local(x, self.mesh, [Replicate()])
        return x.to_local(grad_placements=[Partial()])

    def routed(self, x):
        scores, x = self.copy_to_ranks(self.route(x)), self.copy_to_ranks(x)
        experts = self.experts
        if self.mesh is not None:
            experts, scores = experts.to_local(), scores.chunk(WORLD, -1)[RANK]
        y = torch.einsum("bd,edh,be->bh", x, experts, scores)
        if BUG == "only_rank_0_applies_factor":
            y = y * FACTOR if RANK == 0 else y
        elif BUG != "factor_scales_shared_expert_too":
            y = y * FACTOR
        if self.mesh is None:
            return y
        y = DTensor.from_local(y, self.mesh, [Partial()])
        return y.redistribute(placements=[Replicate()]).to_local()

    def forward(self, x):
        y = self.routed(x) + self.shared(x)
        if BUG == "factor_scales_shared_expert_too":
            y = y * FACTOR
        return x + y


def main():
    mesh = None
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, WIDTH), MixtureOfExperts(mesh), nn.Linear(WIDTH, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(20, 5, generator=torch.Generator().manual_seed(step))
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


main()
