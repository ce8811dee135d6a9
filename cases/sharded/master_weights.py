"""Weights are loaded after the optimizer copied its part of the master weights.

id = "sharded/master_weights"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["hpcaitech/ColossalAI#4618", "deepspeedai/DeepSpeed#2058"]
date = "2023-09"
tags = ["gathered", "adam"]

[wrong.master_weights_are_those_of_before_load]
title = "the master weights are those of before the load"
place = { node = "start", step = 0, ranks = "all", tensors = "all" }

[wrong.rank_1_does_not_copy_its_master_weights]
title = "rank 1 does not copy its master weights"
place = { node = "update", step = 0, ranks = [1], tensors = ["0.bias", "2.*", "4.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class MasterAdam(torch.optim.Optimizer):
    """Adam of a part of the weights, of which each rank has its own copy."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})
        self.weights = self.param_groups[0]["params"]
        self.size = -(-sum(p.numel() for p in self.weights) // WORLD)
        self.master = nn.Parameter(self.part(parameters_to_vector(self.weights)))
        self.inner = torch.optim.Adam([self.master], lr=lr, eps=1e-4)

    def part(self, flat):
        padded = nn.functional.pad(flat.detach(), (0, self.size * WORLD - flat.numel()))
        return padded.split(self.size)[RANK].clone()

    def reload(self):
        self.master.data.copy_(self.part(parameters_to_vector(self.weights)))

    @torch.no_grad()
    def step(self, closure=None):
        gradient = torch.cat([p.grad.flatten() for p in self.weights])
        if WORLD > 1:
            dist.all_reduce(gradient, dist.ReduceOp.AVG)
        self.master.grad = self.part(gradient)
        self.inner.step()
        self.gather()

    def gather(self):
        flat = parameters_to_vector(self.weights)
        parts = [self.master.detach()]
        if WORLD > 1:
            own = self.master.detach()
            if BUG == "rank_1_does_not_copy_its_master_weights":
                padded = nn.functional.pad(flat, (0, self.size * WORLD - flat.numel()))
                parts = list(padded.split(self.size))
                own = parts[RANK].clone() if RANK else own
            parts = [torch.empty_like(own) for _ in range(WORLD)]
            dist.all_gather(parts, own)
        vector_to_parameters(torch.cat(parts)[: flat.numel()], self.weights)


def pretrained(model):
    generator = torch.Generator().manual_seed(9)
    return {
        name: torch.randn(p.shape, generator=generator) * 0.3
        for name, p in model.state_dict().items()
    }


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 5), nn.ReLU(), nn.Linear(5, 1))
    optimizer = MasterAdam(model.parameters())
    model.load_state_dict(pretrained(model))
    if BUG != "master_weights_are_those_of_before_load":
        optimizer.reload()
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(20, 7, generator=torch.Generator().manual_seed(step))
            own = x[RANK::WORLD]
            loss = nn.functional.smooth_l1_loss(model(own), own.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
