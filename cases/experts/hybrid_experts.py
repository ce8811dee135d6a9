"""Copies of an expert on two pairs of ranks: their gradients need a sum over the copies.

id = "experts/hybrid_experts"
framework = "torch"
processes = 4
steps = 2
mode = "pair"
references = ["facebookresearch/fairseq#4220", "NVIDIA/Megatron-LM#5956"]
date = "2022-02"
tags = ["experts", "sgd"]

[wrong.copies_of_expert_are_not_added]
title = "copies of an expert are not added"
place = { node = "sum", step = 0, ranks = "all", tensors = ["0.experts"] }

[wrong.experts_are_added_over_all_ranks]
title = "experts are added over all ranks"
place = { node = "sum", step = 0, ranks = "all", tensors = ["0.experts"] }

[wrong.divided_by_number_of_copies]
title = "divided by the number of copies"
place = { node = "sum", step = 0, ranks = "all", tensors = ["0.experts"] }
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
EXPERTS, WIDTH, BATCH = 4, 8, 32


class Moe(nn.Module):
    """Each expert takes the same number of tokens: those in its place of the batch."""

    group = None

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)

    def exchange(self, x):
        if self.group is None:
            return x
        return all_to_all_single(torch.empty_like(x), x.contiguous(), group=self.group)

    def forward(self, x):
        own = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
        ranks = EXPERTS // len(own)
        y = self.exchange(x.view(EXPERTS, -1, WIDTH))  # Now [source rank and own expert, …].
        y = y.view(ranks, len(own), -1, WIDTH)
        y = torch.einsum("retd,edh->reth", y, own).relu().reshape(EXPERTS, -1, WIDTH)
        return x + self.gate(x).sigmoid() * self.exchange(y).reshape(x.shape)


def reduce_gradients(model, mesh):
    for name, weight in model.named_parameters():
        if "experts" not in name:
            dist.all_reduce(weight.grad)
            weight.grad /= WORLD
            continue
        grad = weight.grad.to_local()
        if BUG == "experts_are_added_over_all_ranks":
            dist.all_reduce(grad)
        elif BUG != "copies_of_expert_are_not_added":
            dist.all_reduce(grad, group=mesh["dp"].get_group())
        grad /= mesh["dp"].size() if BUG == "divided_by_number_of_copies" else WORLD


def main():
    torch.manual_seed(0)
    model, mesh, layout = nn.Sequential(Moe(), nn.Linear(WIDTH, 3)), None, {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("dp", "ep"))
        Moe.group = mesh["ep"].get_group()
        experts = distribute_tensor(model[0].experts.detach(), mesh["ep"], [Shard(0)])
        model[0].experts = nn.Parameter(experts)
        layout = {"mesh": mesh, "dims": "b[dp,ep] d"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    with harness.training(model, optimizer, **layout):
        for _ in range(2):
            x = torch.randn(EXPERTS, BATCH // EXPERTS, WIDTH)
            y = x[..., :3].argmax(-1)
            x, y = (part[:, RANK::WORLD].flatten(0, 1) for part in (x, y))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if WORLD > 1:
                reduce_gradients(model, mesh)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
