"""With sequence parallelism, a replicated LoRA factor gets the gradient of its own tokens alone.

reference = "modelscope/mcore-bridge#173"
date = "2026-08"
framework = "torch"

[wrong]
"the replicated factors are not summed" = ["partial_not_reduced", "not_all_reduced"]
"only A of the first layer is summed" = ["partial_not_reduced", "partly_all_reduced"]
"the replicated factors are averaged" = ["mean_instead_of_sum", "scaled_gradient"]
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import lockstep

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
    if BUG == "the replicated factors are not summed":
        names = {}
    if BUG == "only A of the first layer is summed":
        del names["down_b"]
    for p in names.values():
        dist.all_reduce(p.grad)
        if BUG == "the replicated factors are averaged":
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
    with lockstep.record(model, optimizer):
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
