"""In a row-parallel LoRA layer, the shards of A must be different parts, and their sum is reduced.

id = "adapters/lora_parts_of_a"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["PaddlePaddle/PaddleNLP#9427", "InfiniTensor/InfiniTrain#150"]
date = "2024-11"
tags = ["tensor_parallel", "lora", "sgd"]

[wrong.all_shards_of_a_start_from_same_numbers]
title = "all shards of A start from the same numbers"
place = { node = "start", step = 0, ranks = [1], tensors = ["output.lora_a"] }

[wrong.product_with_a_is_not_reduced]
title = "the product with A is not reduced"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["output"] }

[wrong.b_output_is_reduced_too]
title = "B's output is reduced, too"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["output"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class RowParallelLora(nn.Module):
    """Each rank has some of the inputs: columns of the base weight and of A; B is replicated."""

    def __init__(self, size, features, rank=4, alpha=4):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, size) / size**0.5, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(features), requires_grad=False)
        self.lora_a = nn.Parameter(torch.empty(rank, size).uniform_(-0.4, 0.4))
        self.lora_b = nn.Parameter(torch.randn(features, rank) * 0.1)
        self.scaling = alpha / rank

    def split(self, mesh):
        weight = distribute_tensor(self.weight.detach(), mesh, [Shard(1)])
        self.weight = nn.Parameter(weight, requires_grad=False)
        a = distribute_tensor(self.lora_a.detach(), mesh, [Shard(1)])
        if BUG == "all_shards_of_a_start_from_same_numbers":
            first = self.lora_a.detach().chunk(WORLD, 1)[0].contiguous()
            a = DTensor.from_local(first, mesh, [Shard(1)])
        self.lora_a = nn.Parameter(a)

    def forward(self, x):
        weight, a = self.weight, self.lora_a
        if WORLD > 1:
            x = x.chunk(WORLD, -1)[RANK]
            weight, a = weight.to_local(), a.to_local()
        low = x @ a.T
        if BUG != "product_with_a_is_not_reduced":
            low = AllReduce.apply(low)
        change = self.scaling * low @ self.lora_b.T
        if BUG == "b_output_is_reduced_too":
            return AllReduce.apply(x @ weight.T + change) + self.bias
        return AllReduce.apply(x @ weight.T) + change + self.bias


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten())
        self.features.requires_grad_(False)
        self.output = RowParallelLora(36, 5)

    def forward(self, images):
        return self.output(self.features(images))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Classifier()
    if WORLD > 1:
        model.output.split(init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",)))
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(adapters, lr=0.5, momentum=0.9)
    images, labels = torch.randn(2, 10, 1, 8, 8), torch.randint(5, (2, 10))
    with harness.training(model, optimizer):
        for x, y in zip(images, labels, strict=True):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
