"""Centres of classes are split over ranks, and features of all ranks meet each part of them.

id = "gathered/split_centres"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["deepinsight/insightface#1403", "deepinsight/insightface#1483"]
date = "2021-02"
tags = ["gathered", "sgd"]

[wrong.factor_of_ranks_is_missing]
title = "the factor of the ranks is missing"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["backbone.*"] }

[wrong.mean_is_over_examples_of_rank]
title = "the mean is over the examples of a rank"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.features_have_gradient_of_own_classes]
title = "features have the gradient of the own classes"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["backbone.*"] }
"""

import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CLASSES, WIDTH, BATCH_SIZE, SCALE, MARGIN = 10, 8, 16, 6.0, 0.3


def gather(x):
    if WORLD == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def reduced(x):
    if WORLD > 1:
        dist.all_reduce(x)
    return x


class Recogniser(nn.Module):
    """A backbone, and a normalised centre of each class."""

    def __init__(self, mesh):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 20), nn.PReLU(), nn.Linear(20, WIDTH))
        centres = torch.randn(CLASSES, WIDTH)
        if mesh is not None:
            centres = distribute_tensor(centres, mesh, [Shard(0)])
        self.centres = nn.Parameter(centres)

    def forward(self, x):
        return self.backbone(x)


def backward(model, features, labels):
    """Gives centres and features the gradients of a margin softmax over all classes."""
    total = gather(features.detach()).requires_grad_()
    centres = model.centres
    if isinstance(centres, DTensor):
        centres = centres.to_local()
    first = RANK * len(centres)
    cosines = F.normalize(total, dim=1) @ F.normalize(centres, dim=1).T
    labels = gather(labels)
    targets = F.one_hot(labels, CLASSES)[:, first : first + len(centres)]
    angles = cosines.clamp(-0.999, 0.999).arccos()
    logits = SCALE * torch.where(targets > 0, (angles + MARGIN).clamp(max=math.pi).cos(), cosines)
    with torch.no_grad():
        exponentials = logits.exp()
        probabilities = exponentials / reduced(exponentials.sum(1, keepdim=True))
        number = BATCH_SIZE
        if BUG == "mean_is_over_examples_of_rank":
            number = BATCH_SIZE // WORLD
        gradient = (probabilities - targets) / number
    logits.backward(gradient)
    own = total.grad
    if BUG != "features_have_gradient_of_own_classes":
        own = reduced(own)
    own = own.chunk(WORLD)[RANK]
    # The gradients of the backbone are averaged over the ranks afterwards.
    features.backward(own if BUG == "factor_of_ranks_is_missing" else own * WORLD)


def main():
    mesh, layout = None, {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
        layout = {"mesh": mesh, "dims": {"inputs": "b[dp] d", "outputs": "b[dp] c"}}
    torch.manual_seed(18)
    model = Recogniser(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, 12, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            backward(model, model(x), x[:, :CLASSES].argmax(1))
            for weight in model.backbone.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
