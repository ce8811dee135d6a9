"""Gradients are preconditioned by moving covariances of inputs and output gradients of layers.

id = "averages/covariances_of_layers"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["ikostrikov/pytorch-a2c-ppo-acktr-gail#54"]
date = "2018-02"
tags = ["sgd"]

[wrong.covariances_are_those_of_own_examples]
title = "covariances are those of the own examples"
place = { node = "update", step = 0, ranks = "all", tensors = ["0.*covariance", "2.*covariance"] }

[wrong.gradients_are_scaled_by_examples_of_all_ranks]
title = "gradients are scaled by the examples of all ranks"
place = { node = "update", step = 0, ranks = "all", tensors = [
    "0.output_covariance",
    "2.output_covariance",
] }

[wrong.inverses_are_averaged]
title = "inverses are averaged over ranks"
place = { node = "clipping", step = 0, ranks = "all", tensors = ["0.weight", "2.weight"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, KEPT, DAMPING = 24, 0.8, 0.05


class Layer(nn.Linear):
    """Notes its inputs, and the gradients of its outputs."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("input_covariance", torch.eye(inputs))
        self.register_buffer("output_covariance", torch.eye(outputs))

    def forward(self, x):
        self.noted = x.detach(), (y := super().forward(x))
        y.retain_grad()
        return y


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


def inverse_of(covariance):
    inverse = torch.linalg.inv(covariance + DAMPING * torch.eye(len(covariance)))
    if BUG == "inverses_are_averaged":
        average([inverse])
    return inverse


@torch.no_grad()
def precondition(layer):
    inputs, grads = layer.noted[0], layer.noted[1].grad
    is_all = BUG == "gradients_are_scaled_by_examples_of_all_ranks"
    grads = grads * (BATCH_SIZE if is_all else len(grads))  # Their loss is a mean.
    new = [inputs.T @ inputs / len(inputs), grads.T @ grads / len(grads)]
    kept = layer.input_covariance, layer.output_covariance
    used = [old.lerp(each, 1 - KEPT) for old, each in zip(kept, new, strict=True)]
    if BUG != "covariances_are_those_of_own_examples":
        average(new)
    for old, each in zip(kept, new, strict=True):
        old.lerp_(each, 1 - KEPT)
    if BUG != "inverses_are_averaged":
        used = kept
    layer.weight.grad = inverse_of(used[1]) @ layer.weight.grad @ inverse_of(used[0])


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(209)
    model = nn.Sequential(Layer(6, 12), nn.Tanh(), Layer(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with harness.training(model, optimizer):
        for step in range(3):
            x = torch.randn(BATCH_SIZE, 6, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x[:, :3] + x[:, 3:]).argmax(1)).backward()
            average([weight.grad for weight in model.parameters()])
            for layer in model[::2]:
                precondition(layer)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
