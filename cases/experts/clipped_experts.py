"""The norm for clipping counts the experts of one rank only, or is a mean over the ranks.

id = "experts/clipped_experts"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["deepspeedai/DeepSpeed#8475", "hpcaitech/ColossalAI#2192", "laekov/fastmoe#29"]
date = "2026-09"
tags = ["experts", "gathered", "sgd"]

[wrong.norms_of_other_experts_are_left_out]
title = "norms of other experts are left out"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.norms_of_ranks_are_averaged]
title = "norms of the ranks are averaged"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.shared_weights_count_once_per_rank]
title = "shared weights count once per rank"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather, reduce_scatter

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXPERTS, WIDTH, BATCH, MAX_NORM = 4, 10, 24, 0.05


class Experts(nn.Module):
    """Soft mixture: each rank applies its experts to the tokens of all ranks."""

    def __init__(self):
        super().__init__()
        own = slice(RANK * EXPERTS // WORLD, (RANK + 1) * EXPERTS // WORLD)
        self.w = nn.Parameter((torch.randn(EXPERTS, WIDTH, WIDTH) / 3)[own].clone())
        self.own = own

    def forward(self, x, weights):
        if WORLD > 1:
            x, weights = (torch.cat(all_gather(part.contiguous())) for part in (x, weights))
        y = torch.einsum("td,edh->teh", x, self.w).relu()
        y = (y * weights[:, self.own, None]).sum(1)
        if WORLD > 1:
            parts = [part.contiguous() for part in y.chunk(WORLD)]
            y = reduce_scatter(torch.empty_like(parts[0]), parts)
        return y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.experts(x, self.router(x).softmax(-1)))


def clip(model):
    shared = [w.grad for n, w in model.named_parameters() if not n.startswith("experts")]
    experts = [w.grad for w in model.experts.parameters()]
    of_shared, of_experts = (sum(g.square().sum() for g in part) for part in (shared, experts))
    if WORLD == 1 or BUG == "norms_of_other_experts_are_left_out":
        norm = (of_shared + of_experts).sqrt()
    elif BUG == "norms_of_ranks_are_averaged":
        norm = (of_shared + of_experts).sqrt() / WORLD
        dist.all_reduce(norm)
    elif BUG == "shared_weights_count_once_per_rank":
        norm = of_shared + of_experts
        dist.all_reduce(norm)
        norm = norm.sqrt()
    else:
        dist.all_reduce(of_experts)
        norm = (of_shared + of_experts).sqrt()
    for grad in shared + experts:
        grad *= (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)


def main():
    torch.manual_seed(0)
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
        layout = {"mesh": mesh, "dims": {"inputs": "b[ep] d", "experts.w": "e[ep] i o"}}
    model = Net()
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with harness.training(model, optimizer, **layout):
        for _ in range(2):
            x = torch.randn(BATCH, WIDTH)
            x, y = (part.chunk(WORLD)[RANK] for part in (x, x[:, :3].argmax(-1)))
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y, reduction="sum") / BATCH).backward()
            for name, weight in model.named_parameters():
                if WORLD > 1 and not name.startswith("experts"):
                    dist.all_reduce(weight.grad)
            clip(model)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
