"""A replicated bias is added to partial sums, on each rank.

id = "sharded/partial_plus_bias"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/torchtitan#2106"]
date = "2025-12"
tags = ["experts", "sgd"]

[wrong.each_rank_adds_whole_bias]
title = "each rank adds the whole bias"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["expert.*"] }

[wrong.gradient_of_sum_is_summed_again]
title = "the gradient of the sum is summed again"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["first.*", "expert.*"] }

[wrong.bias_is_scaled_in_backward_pass_too]
title = "the bias is scaled in the backward pass, too"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["expert.bias"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        if BUG == "gradient_of_sum_is_summed_again":
            gradient = gradient.clone()
            dist.all_reduce(gradient)
        return gradient


class ScaleBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, bias):
        return bias / WORLD

    @staticmethod
    def backward(ctx, gradient):
        if BUG == "bias_is_scaled_in_backward_pass_too":
            return gradient / WORLD
        return gradient


class Expert(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up = nn.Parameter(torch.randn(hidden, width) * 0.3)
        self.down = nn.Parameter(torch.randn(width, hidden) * 0.3)
        self.bias = nn.Parameter(torch.randn(width))

    def parallelize(self, mesh):
        self.up = nn.Parameter(distribute_tensor(self.up.detach(), mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(self.down.detach(), mesh, [Shard(1)]))

    def forward(self, x):
        if WORLD == 1:
            return torch.relu(x @ self.up.T) @ self.down.T + self.bias
        hidden = torch.relu(Enter.apply(x) @ self.up.to_local().T)
        bias = self.bias if BUG == "each_rank_adds_whole_bias" else ScaleBias.apply(self.bias)
        return Leave.apply(hidden @ self.down.to_local().T + bias)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.expert = Expert(10, 14)
        self.last = nn.Linear(10, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.expert(torch.tanh(self.first(x)))))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = Net()
    if WORLD > 1:
        net.expert.parallelize(init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    x = torch.randn(2, 20, 6)
    with harness.training(net, optimizer):
        for part in x:
            nn.functional.cross_entropy(net(part), part[:, :4].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
