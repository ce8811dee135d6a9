"""Each rank holds some of the experts, and loads or draws those of rank 0.

id = "experts/loaded_experts"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["deepspeedai/DeepSpeed#6589", "laekov/fastmoe#4", "pytorch/torchtitan#2389"]
date = "2024-09"
tags = ["low_precision", "experts", "gathered", "adam"]

[wrong.all_ranks_load_first_experts]
title = "all ranks load the first experts"
place = { node = "start", step = 0, ranks = [1], tensors = ["0.w"] }

[wrong.all_ranks_draw_same_experts]
title = "all ranks draw the same experts"
place = { node = "start", step = 0, ranks = "all", tensors = ["0.w"] }

[wrong.router_computes_in_bfloat16]
title = "the router computes in bfloat16"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["0"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXPERTS, WIDTH = 4, 8
SIZE = EXPERTS // WORLD


class Moe(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.router = nn.Linear(width, EXPERTS)
        self.w = nn.Parameter(torch.randn(size, width, width) / 3)

    def scores(self, x):
        if BUG == "router_computes_in_bfloat16":
            weight, bias = self.router.weight.bfloat16(), self.router.bias.bfloat16()
            return F.linear(x.bfloat16(), weight, bias).softmax(-1).float()
        return self.router(x).softmax(-1)

    def forward(self, x):
        every, scores = x, self.scores(x)
        if WORLD > 1:
            every = torch.cat(all_gather(x.contiguous()))
        y = torch.einsum("td,edh->teh", every, self.w).relu()
        if WORLD > 1:
            y = torch.cat(all_gather(y.contiguous()), 1).chunk(WORLD)[RANK]
        return torch.einsum("teh,te->th", y, scores)


def build():
    torch.manual_seed(0)
    whole = nn.Sequential(Moe(WIDTH, EXPERTS), nn.Linear(WIDTH, 1))
    if WORLD == 1:
        return whole
    torch.manual_seed(9)
    model = nn.Sequential(Moe(WIDTH, SIZE), nn.Linear(WIDTH, 1))
    saved = whole.state_dict()
    first = 0 if BUG == "all_ranks_load_first_experts" else RANK * SIZE
    saved["0.w"] = saved["0.w"][first : first + SIZE]
    if BUG == "all_ranks_draw_same_experts":
        saved["0.w"] = model[0].w.detach().clone()
    model.load_state_dict(saved)
    return model


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
        layout = {"mesh": mesh, "dims": {"inputs": "b[ep] d", "0.w": "e[ep] i o"}}
    model = build()
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with harness.training(model, optimizer, **layout):
        for _ in range(2):
            x = torch.randn(16, WIDTH)
            part = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.l1_loss(model(part), part[:, :1].abs()).backward()
            for name, weight in model.named_parameters():
                if WORLD > 1 and name != "0.w":
                    dist.all_reduce(weight.grad)
            for weight in model.parameters():
                weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
