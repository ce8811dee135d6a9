"""Ranks gather all tokens as a DTensor, and each computes its own experts for them.

id = "experts/gathered_tokens"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA-NeMo/Automodel#1260", "pytorch/torchtitan#4054"]
date = "2026-02"
tags = ["experts", "gathered", "sgd"]

[wrong.tokens_have_gradient_of_own_experts]
title = "tokens have the gradient of the own experts"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["0.*"] }

[wrong.scores_have_gradient_of_own_experts]
title = "scores have the gradient of the own experts"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["1.router.weight", "0.*"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXPERTS, WIDTH, HIDDEN, BATCH_SIZE = 4, 8, 10, 20


class GroupedExperts(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        up, down = torch.randn(EXPERTS, WIDTH, HIDDEN) / 2, torch.randn(EXPERTS, HIDDEN, WIDTH) / 3
        if mesh is not None:
            up, down = (distribute_tensor(each, mesh, [Shard(0)]) for each in (up, down))
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)

    def gather(self, x, is_whole):
        """Returns the rows of all ranks; each rank has a part of their gradient."""
        x = DTensor.from_local(x, self.mesh, [Shard(0)])
        return x.full_tensor() if is_whole else x.full_tensor(grad_placements=[Partial()])

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        scores = torch.where(scores >= scores.topk(2, -1).values[:, 1:], scores, 0)
        if self.mesh is None:
            return x + self.experts(x, scores, self.up, self.down)
        tokens = self.gather(x, BUG == "tokens_have_gradient_of_own_experts")
        scores = self.gather(scores, BUG == "scores_have_gradient_of_own_experts")
        scores = scores.chunk(WORLD, 1)[RANK]
        y = self.experts(tokens, scores, self.up.to_local(), self.down.to_local())
        y = DTensor.from_local(y, self.mesh, [Partial()])
        return x + y.redistribute(placements=[Shard(0)]).to_local()

    def experts(self, x, scores, up, down):
        hidden = F.softplus(torch.einsum("td,edh->teh", x, up))
        return torch.einsum("teh,ehd,te->td", hidden, down, scores)


def average_gradients(model):
    for weight in model.parameters():
        if not isinstance(weight, DTensor):
            dist.all_reduce(weight.grad)
        weight.grad /= WORLD


def main():
    mesh, layout = None, {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
        layout = {"mesh": mesh, "dims": {"inputs": "b[ep] d", "outputs": "b[ep] c"}}
    torch.manual_seed(50)
    model = nn.Sequential(nn.Linear(6, WIDTH), GroupedExperts(mesh), nn.Linear(WIDTH, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, 6, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x[:, :4] * x[:, 4:5]).argmax(1)).backward()
            if WORLD > 1:
                average_gradients(model)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
