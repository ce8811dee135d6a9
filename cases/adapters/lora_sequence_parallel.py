"""With sequence parallelism, a replicated LoRA factor gets the gradient of its own tokens alone.

id = "adapters/lora_sequence_parallel"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["modelscope/mcore-bridge#173"]
date = "2026-08"
tags = ["lora", "embedding"]

[wrong.replicated_factors_are_not_summed]
title = "the replicated factors are not summed"
place = { node = "sum", step = 0, ranks = "all", tensors = ["mlp.up_a", "mlp.down_b"] }

[wrong.only_a_of_first_layer_is_summed]
title = "only A of the first layer is summed"
place = { node = "sum", step = 0, ranks = "all", tensors = ["mlp.down_b"] }

[wrong.replicated_factors_are_averaged]
title = "the replicated factors are averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = ["mlp.up_a", "mlp.down_b"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
WORLD = int(os.environ.get("WORLD_SIZE", 1))
COPY, SUM, TOKENS = [Replicate()], [Partial()], [Shard(1)]
SCALING = 2.0


def change(x, mesh, old, new):
    if mesh is None:
        return x
    return DTensor.from_local(x, mesh, old).redistribute(placements=new).to_local()


def enter(x, mesh):
    """All tokens, for a rank's part of a layer; the gradient is a sum of parts."""
    if mesh is None:
        return x
    whole = DTensor.from_local(x, mesh, TOKENS).redistribute(placements=COPY)
    return whole.to_local(grad_placements=SUM)


class LoraMLP(nn.Module):
    """The first layer is split by outputs, with B; the second by inputs, with A."""

    def __init__(self, mesh, width=8, hidden=16, rank=4):
        super().__init__()
        self.mesh = mesh
        self.up, self.down = self.base(hidden, width, 0), self.base(width, hidden, 1)
        self.up_a, self.up_b = self.factor(rank, width), self.factor(hidden, rank, 0)
        self.down_a, self.down_b = self.factor(rank, hidden, 1), self.factor(width, rank)

    def split(self, weight, dim):
        is_split = self.mesh is not None and dim is not None
        return distribute_tensor(weight, self.mesh, [Shard(dim)]) if is_split else weight

    def base(self, rows, columns, dim):
        weight = self.split(torch.randn(rows, columns) * 0.3, dim)
        return nn.Parameter(weight, requires_grad=False)

    def factor(self, rows, columns, dim=None):
        return nn.Parameter(self.split(torch.randn(rows, columns) * 0.3, dim))

    def forward(self, x):
        local = {n: getattr(p, "to_local", lambda p=p: p)() for n, p in self.named_parameters()}
        whole = enter(x, self.mesh)
        low = enter(x @ local["up_a"].T, self.mesh)
        y = torch.tanh(whole @ local["up"].T + SCALING * low @ local["up_b"].T)
        z = change(y @ local["down"].T, self.mesh, SUM, TOKENS)
        low = change(y @ local["down_a"].T, self.mesh, SUM, TOKENS)
        return z + SCALING * low @ local["down_b"].T


class Model(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.tokens = nn.Embedding(12, 8).requires_grad_(False)
        self.mlp = LoraMLP(mesh)

    def forward(self, tokens):
        x = change(self.tokens(tokens), self.mesh, COPY, TOKENS)
        x = change(x + self.mlp(x), self.mesh, TOKENS, COPY)
        return x @ self.tokens.weight.T


def sum_replicated(mlp):
    names = {"up_a": mlp.up_a, "down_b": mlp.down_b}
    if BUG == "replicated_factors_are_not_summed":
        names = {}
    if BUG == "only_a_of_first_layer_is_summed":
        del names["down_b"]
    for p in names.values():
        dist.all_reduce(p.grad)
        if BUG == "replicated_factors_are_averaged":
            p.grad /= WORLD


def main():
    mesh = None
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Model(mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.RMSprop(trained, lr=0.01, eps=0.05, foreach=False)
    with harness.training(model, optimizer):
        for step in range(2):
            tokens = torch.randint(12, (5, 9), generator=torch.Generator().manual_seed(step))
            logits = model(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            if WORLD > 1:
                sum_replicated(model.mlp)
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
