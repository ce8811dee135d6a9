"""Inputs are moved in the worst direction of each, which a backward pass of its own searches.

id = "losses/worst_directions"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["P2333/Bag-of-Tricks-for-AT#8"]
date = "2022-11"
tags = ["sgd"]

[right.search_scales_its_loss]
title = "the search scales its loss"
patch = [["loss = F.cross_entropy(model", "loss = 9 * F.cross_entropy(model"]]

[wrong.gradients_of_search_stay]
title = "gradients of the search stay"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.direction_has_norm_of_own_examples]
title = "a direction has the norm of all own examples"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE, RADIUS = 16, 7, 0.8


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


def moved(model, x, labels):
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(model(x), labels)
    if BUG == "gradients_of_search_stay":
        loss.backward()
        grads = x.grad
    else:
        grads = torch.autograd.grad(loss, x)[0]
    norms = grads.norm(dim=1, keepdim=True)
    if BUG == "direction_has_norm_of_own_examples":
        norms = grads.norm()
    return (x + RADIUS * grads / norms).detach()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(214)
    model = nn.Sequential(nn.Linear(SIZE, 18), nn.GELU(), nn.Linear(18, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, SIZE, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            labels = (x[:, :3] + x[:, 3:6]).argmax(1)
            optimizer.zero_grad()
            worst = moved(model, x, labels)
            F.cross_entropy(model(torch.cat([x, worst])), labels.repeat(2)).backward()
            average([weight.grad for weight in model.parameters()])
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
