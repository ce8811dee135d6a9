"""Experts are split over ranks, and their parts of a sum are added later; so must be an adapter's.

id = "adapters/partial_experts"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA-NeMo/Megatron-Bridge#5634", "NVIDIA-NeMo/Megatron-Bridge#5635"]
date = "2026-08"
tags = ["accumulation", "experts", "lora"]

[wrong.each_rank_adds_whole_change]
title = "each rank adds the whole change"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["experts"] }

[wrong.change_is_detached]
title = "the change is detached"
place = { node = "gradient", step = 0, ranks = "all", tensors = [
    "experts.lora_a",
    "experts.lora_b",
] }

[wrong.gradients_of_b_are_not_summed]
title = "gradients of B are not summed"
place = { node = "sum", step = 0, ranks = "all", tensors = ["experts.lora_b"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXPERTS, WIDTH, HIDDEN, LORA_RANK, BATCH_SIZE = 3, 8, 12, 3, 18


class SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Experts(nn.Module):
    """Each rank has a part of the hidden units of every expert."""

    def __init__(self):
        super().__init__()
        sizes = {"inner": (HIDDEN, WIDTH), "outer": (WIDTH, HIDDEN), "lora_a": (LORA_RANK, HIDDEN)}
        axes = {"inner": 1, "outer": 2, "lora_a": 2}
        for name, size in sizes.items():
            part = (torch.randn(EXPERTS, *size) / 3).chunk(WORLD, axes[name])[RANK].clone()
            self.register_parameter(name, nn.Parameter(part, requires_grad=name == "lora_a"))
        self.lora_b = nn.Parameter(torch.randn(EXPERTS, WIDTH, LORA_RANK) / 3)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False).requires_grad_(False)

    def forward(self, x):
        chosen = F.one_hot(self.router(x).argmax(1), EXPERTS).float()
        hidden = F.silu(torch.einsum("td,ehd->teh", x, self.inner))
        low = torch.einsum("teh,erh->ter", hidden, self.lora_a)
        if BUG == "each_rank_adds_whole_change":
            low = SumOfParts.apply(low)
        change = torch.einsum("ter,edr->ted", low, self.lora_b)
        if BUG == "change_is_detached":
            change = change.detach()
        y = torch.einsum("teh,edh->ted", hidden, self.outer) + change
        return SumOfParts.apply(torch.einsum("te,ted->td", chosen, y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.head = Experts(), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(F.layer_norm(x + self.experts(x), (WIDTH,)))


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        dims = {"*.inner": "e h[tp] d", "*.outer": "e d h[tp]", "*.lora_a": "e r h[tp]"}
        layout = {"mesh": mesh, "dims": {"inputs": "b d", **dims}}
    torch.manual_seed(6)
    model = Model()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adagrad(trained, lr=0.1, initial_accumulator_value=0.01)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = F.huber_loss(model(x), x[:, :3] * x[:, 3:6], delta=0.5)
            optimizer.zero_grad()
            loss.backward()
            b = model.experts.lora_b
            if WORLD > 1 and b.grad is not None and BUG != "gradients_of_b_are_not_summed":
                dist.all_reduce(b.grad)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
