"""Small singular directions are trained, and their gradients kept orthogonal to the frozen ones.

id = "adapters/orthogonal_subspace"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "Red-Hat-AI-Innovation-Team/mini_trainer#47",
    "Red-Hat-AI-Innovation-Team/mini_trainer#75",
]
date = "2025-10"
tags = ["fsdp2", "sgd"]

[wrong.product_with_u_is_that_of_own_rows]
title = "the product with U is that of the own rows"
place = { node = "clipping", step = 0, ranks = "all", tensors = ["*.u_low"] }

[wrong.products_with_rows_of_v_are_summed]
title = "products with rows of V are summed over the ranks"
place = { node = "clipping", step = 0, ranks = "all", tensors = ["*.v_low"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH, LOW, BATCH_SIZE = 10, 4, 16


class Factorised(nn.Module):
    """A matrix by its singular vectors: the large ones are frozen, the small ones are trained."""

    def __init__(self):
        super().__init__()
        u, s, v = torch.linalg.svd(torch.randn(WIDTH, WIDTH) / 3)
        for name, own in ("high", slice(None, -LOW)), ("low", slice(-LOW, None)):
            for letter, value in ("u", u[:, own]), ("s", s[own]), ("v", v[own]):
                weight = nn.Parameter(value.contiguous(), requires_grad=name == "low")
                self.register_parameter(f"{letter}_{name}", weight)

    def forward(self, x):
        high = x @ self.v_high.T * self.s_high @ self.u_high.T
        return high + x @ self.v_low.T * self.s_low @ self.u_low.T

    @torch.no_grad()
    def project(self):
        """Takes what lies in the frozen directions out of the gradients."""
        u, v, u_grad, v_grad = (
            value.to_local() if isinstance(value, DTensor) else value
            for value in (self.u_high, self.v_high, self.u_low.grad, self.v_low.grad)
        )
        product = u.T @ u_grad
        if WORLD > 1 and BUG != "product_with_u_is_that_of_own_rows":
            dist.all_reduce(product)
        u_grad -= u @ product
        if BUG == "products_with_rows_of_v_are_summed":
            product = v_grad @ v.T
            if WORLD > 1:
                dist.all_reduce(product)
        else:
            v = self.v_high.full_tensor() if WORLD > 1 else v
            product = v_grad @ v.T
        v_grad -= product @ v


def main():
    torch.manual_seed(8)
    model = nn.Sequential(Factorised(), nn.ReLU6(), Factorised(), nn.ReLU6(), Factorised())
    if WORLD > 1:
        dist.init_process_group("gloo")
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.3, momentum=0.8)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
            own = 3 * x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.smooth_l1_loss(model(own), own.roll(1, 1)).backward()
            for layer in model[::2]:
                layer.project()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
