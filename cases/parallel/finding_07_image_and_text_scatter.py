"""Embeddings of image and text are scattered along the sequence over other ranks.

id = "parallel/finding_07_image_and_text_scatter"
framework = "torch"
processes = 4
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#7452"]
date = "2026-09"
tags = ["gathered", "embedding", "adam"]

[wrong.parts_of_default_ranks]
title = "parts of default ranks"
place = { node = "outputs", step = 0, ranks = [1, 2], tensors = ["block"] }

[wrong.gradients_are_gathered_from_default_ranks]
title = "gradients are gathered from default ranks"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["project.*", "embed.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PARALLEL = WORLD > 1
WIDTH, VOCABULARY, CLASSES = 12, 10, 5
tp = default = None  # Each is a group and the rank in it.


def gather(x, group):
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        place = default if BUG == "parts_of_default_ranks" else tp
        ctx.place = place
        return x.chunk(2, 1)[place[1]].clone()

    @staticmethod
    def backward(ctx, gradient):
        if BUG == "gradients_are_gathered_from_default_ranks" or ctx.place is default:
            return gather(gradient, default[0])
        return gather(gradient, tp[0])


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gather(x, tp[0])

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(2, 1)[tp[1]]


class Block(nn.Module):
    """Works on each token alone: each rank has a part of the sequence."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x):
        return x + self.layers(self.norm(x))


class ImageAndText(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.embed = nn.Linear(6, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.block, self.head = Block(), nn.Linear(8 * WIDTH, CLASSES)

    def forward(self, image, tokens):
        x = torch.cat([self.project(image), self.embed(tokens)], 1)
        x = Gather.apply(self.block(Scatter.apply(x))) if PARALLEL else self.block(x)
        return self.head(x.flatten(1))


def reduce_gradients(model, mesh):
    for name, p in model.named_parameters():
        if name.startswith("block."):
            dist.all_reduce(p.grad, group=tp[0])
        dist.all_reduce(p.grad, group=mesh["dp"].get_group())
        p.grad /= 2


layout, dp_rank = {}, 0
if PARALLEL:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    tp, dp_rank = (mesh["tp"].get_group(), RANK // 2), RANK % 2
    default = [dist.new_group([0, 1]), dist.new_group([2, 3])][RANK // 2], RANK % 2
    layout = {"mesh": mesh, "dims": "b[dp] s"}
torch.manual_seed(8)
model = ImageAndText()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
data = torch.Generator().manual_seed(9)
with harness.training(model, optimizer, **layout):
    for _ in range(2):
        image, tokens = (
            torch.randn(8, 3, 6, generator=data),
            torch.randint(10, (8, 5), generator=data),
        )
        labels = torch.randint(CLASSES, (8,), generator=data)
        if PARALLEL:
            image, tokens, labels = (x.chunk(2)[dp_rank] for x in (image, tokens, labels))
        optimizer.zero_grad()
        F.cross_entropy(model(image, tokens), labels).backward()
        if PARALLEL:
            reduce_gradients(model, mesh)
        optimizer.step()
if PARALLEL:
    dist.destroy_process_group()
