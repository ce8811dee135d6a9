"""All experts share one adapter, of which each rank has a copy beside its own experts.

id = "adapters/shared_by_experts"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA-NeMo/Megatron-Bridge#6009", "NVIDIA-NeMo/Megatron-Bridge#5396"]
date = "2026-08"
tags = ["experts", "lora"]

[wrong.gradients_of_adapter_are_not_summed]
title = "gradients of the adapter are not summed"
place = { node = "sum", step = 0, ranks = "all", tensors = ["2.down", "2.up"] }

[wrong.gradients_of_adapter_are_averaged]
title = "gradients of the adapter are averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = ["2.down", "2.up"] }

[wrong.each_rank_draws_its_adapter]
title = "each rank draws its adapter"
place = { node = "start", step = 0, ranks = [1], tensors = ["2.down", "2.up"] }
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
EXPERTS, WIDTH, LORA_RANK = 4, 14, 3


class Experts(nn.Module):
    """Each rank computes its experts for all tokens, and the results are added."""

    def __init__(self, mesh):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False).requires_grad_(False)
        weight = torch.randn(EXPERTS, WIDTH, WIDTH) / 3
        if mesh is not None:
            weight = distribute_tensor(weight, mesh, [Shard(0)])
        self.weight = nn.Parameter(weight, requires_grad=False)
        generator = torch.Generator().manual_seed(3)
        if BUG == "each_rank_draws_its_adapter":
            generator.manual_seed(3 + RANK)
        self.down = nn.Parameter(torch.randn(WIDTH, LORA_RANK, generator=generator) / 3)
        self.up = nn.Parameter(torch.randn(LORA_RANK, WIDTH, generator=generator) / 3)

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        best = scores.topk(2, -1).indices
        gates = scores * F.one_hot(best, EXPERTS).sum(-2)
        weight = self.weight
        if isinstance(weight, DTensor):
            weight, gates = weight.to_local(), gates.chunk(WORLD, -1)[RANK]
        y = torch.einsum("td,edh->teh", x, weight) + (x @ self.down @ self.up).unsqueeze(1)
        y = torch.einsum("teh,te->th", F.relu(y).square(), gates)
        if WORLD > 1:
            total = y.detach().clone()
            dist.all_reduce(total)
            y = y + (total - y).detach()  # Each rank has the sum, and the gradient of its part.
        return y


def reduce_gradients(experts):
    if WORLD == 1 or BUG == "gradients_of_adapter_are_not_summed":
        return
    for weight in (experts.down, experts.up):
        dist.all_reduce(weight.grad)
        if BUG == "gradients_of_adapter_are_averaged":
            weight.grad /= WORLD


def main():
    mesh, layout = None, {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
        layout = {"mesh": mesh, "dims": "b d"}
    torch.manual_seed(9)
    first = nn.Linear(6, WIDTH).requires_grad_(False)
    experts = Experts(mesh)
    model = nn.Sequential(first, nn.LayerNorm(WIDTH, elementwise_affine=False), experts)
    model.append(nn.Linear(WIDTH, 4))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adagrad(trained, lr=0.05, eps=1e-4)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            x = torch.randn(20, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            F.multi_margin_loss(model(x), x[:, :4].argmax(1)).backward()
            reduce_gradients(experts)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
