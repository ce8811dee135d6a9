"""Adam corrects its moments by the steps of each weight, of which some have no gradient at times.

id = "sharded/step_of_each_weight"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = [
    "NVIDIA/DeepLearningExamples#391",
    "deepspeedai/DeepSpeed#8471",
    "flashlight/flashlight#143",
]
date = "2020-02"
tags = ["fsdp2", "adam"]

[wrong.count_advances_with_each_weight]
title = "the count advances with each weight"
place = { node = "update", step = 0, ranks = "all", tensors = ["first.bias", "last.*"] }

[wrong.all_weights_have_count_of_last_one]
title = "all weights have the count of the last one"
place = { node = "update", step = 1, ranks = "all", tensors = ["first.*", "last.*"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH = 14


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, weights, lr=0.02, betas=(0.9, 0.95), eps=1e-4):
        super().__init__(weights, {"lr": lr, "betas": betas, "eps": eps})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        active = [w for w in self.param_groups[0]["params"] if w.grad is not None]
        for weight in active:
            state = self.state[weight]
            if not state:
                state.update(step=0, mean=torch.zeros_like(weight), square=torch.zeros_like(weight))
            state["step"] += 1
        for weight in active:
            self.count += 1
            count = self.state[weight]["step"]
            if BUG == "count_advances_with_each_weight":
                count = self.count
            elif BUG == "all_weights_have_count_of_last_one":
                count = self.state[active[-1]]["step"]
            self.update(weight, count, **self.param_groups[0])

    def update(self, weight, count, lr, betas, eps, params):
        state, gradient = self.state[weight], weight.grad
        state["mean"].lerp_(gradient, 1 - betas[0])
        state["square"].mul_(betas[1]).add_(gradient * gradient * (1 - betas[1]))
        mean = state["mean"] / (1 - betas[0] ** count)
        square = state["square"] / (1 - betas[1] ** count)
        weight.sub_(lr * mean / (square.sqrt() + eps))


class Skipping(nn.Module):
    """Its middle block is trained in some steps only."""

    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(9, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x, is_deep):
        x = F.gelu(self.first(x))
        return self.last(x + F.gelu(self.middle(x)) if is_deep else x)


def main():
    torch.manual_seed(27)
    model = Skipping()
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,))
        fully_shard(model.middle, mesh=mesh)
        fully_shard(model, mesh=mesh)
    order = [*model.first.parameters(), *model.last.parameters(), *model.middle.parameters()]
    optimizer = FusedAdam(order)
    with harness.training(model, optimizer):
        for step in range(3):
            x = torch.randn(16, 9, generator=torch.Generator().manual_seed(step))
            x = x[RANK::WORLD]
            optimizer.zero_grad(set_to_none=True)
            logits = model(x, is_deep=step != 0)
            F.cross_entropy(logits, x[:, :4].argmax(1)).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
