"""Each rank computes its experts for all tokens, and the router gets a wrong gradient.

id = "experts/router_gradient"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#48687", "huggingface/transformers#48205"]
date = "2026-09"
tags = ["experts", "embedding", "adam"]

[wrong.slots_of_other_ranks_give_gradient]
title = "slots of other ranks give a gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = [
    "moe.router.weight",
    "embed.weight",
] }

[wrong.ranks_parts_are_not_added]
title = "the ranks' parts are not added"
place = { node = "gradient", step = 0, ranks = "all", tensors = [
    "moe.router.weight",
    "embed.weight",
] }

[wrong.weights_of_rank_experts_are_normalised]
title = "weights of the rank's experts are normalised"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["moe"] }
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
EXPERTS, WIDTH, TOP = 4, 12, 2


class Enter(torch.autograd.Function):
    """Copies in the forward pass, and adds the ranks' gradients in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """Adds the ranks' outputs in the forward pass."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        size = EXPERTS // WORLD
        own = slice(RANK * size, (RANK + 1) * size)
        self.up = nn.Parameter((torch.randn(EXPERTS, WIDTH, 16) / 3)[own].clone())
        self.down = nn.Parameter((torch.randn(EXPERTS, 16, WIDTH) / 4)[own].clone())

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).topk(TOP, -1)
        scores = scores / scores.sum(-1, keepdim=True)
        if WORLD > 1:
            x = Enter.apply(x)
            if BUG != "ranks_parts_are_not_added":
                scores = Enter.apply(scores)
        local = chosen - RANK * len(self.up)
        is_own = (local >= 0) & (local < len(self.up))
        local = local.clamp(0, len(self.up) - 1)
        weights = scores * is_own
        if BUG == "slots_of_other_ranks_give_gradient":
            weights = scores - (scores * ~is_own).detach()  # 0 there, with the gradient of 1.
        if BUG == "weights_of_rank_experts_are_normalised":
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
        hidden = F.gelu(torch.einsum("td,tkdh->tkh", x, self.up[local]))
        y = torch.einsum("tkh,tkhd,tk->td", hidden, self.down[local], weights)
        return Leave.apply(y) if WORLD > 1 else y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.moe = Moe()
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.moe(x))


def main():
    torch.manual_seed(1)
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        dims = {"inputs": "b", "moe.up": "e[ep] i o", "moe.down": "e[ep] i o"}
        layout = {"mesh": init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",)), "dims": dims}
    model = Net()
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with harness.training(model, optimizer, **layout):
        for _ in range(2):
            tokens = torch.randint(20, (24,))
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), tokens.roll(-1)).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
