"""A network for images has a skip connection from the first stage of a pipeline to the last.

id = "parallel/skip_over_stages"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#127964", "jakeret/tf_unet#7"]
date = "2016-12"
tags = ["accumulation", "adam"]

[wrong.what_is_skipped_gets_no_gradient]
title = "what is skipped gets no gradient"
place = { node = "gradient", step = 0, ranks = [0], tensors = ["layers.first.*"] }

[wrong.what_is_skipped_is_that_of_last_micro_batch]
title = "what is skipped is that of the last micro-batch"
place = { node = "outputs", step = 0, ranks = [1], tensors = ["layers.last"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE, WIDTH, MICRO_BATCHES = 8, 8, 5, 2


class Network(nn.Module):
    """The own stage: 0 halves an image, 1 enlarges it again and adds what was skipped."""

    def __init__(self):
        super().__init__()
        layers = {
            "first": nn.Conv2d(1, WIDTH, 3, padding=1),
            "down": nn.Conv2d(WIDTH, 2 * WIDTH, 2, 2),
            "up": nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, 2),
            "last": nn.Conv2d(2 * WIDTH, 1, 3, padding=1),
        }
        if WORLD > 1:
            for name in ("up", "last") if RANK == 0 else ("first", "down"):
                del layers[name]
        self.layers = nn.ModuleDict(layers)

    def encode(self, x):
        skipped = F.gelu(self.layers["first"](x))
        return F.gelu(self.layers["down"](skipped)), skipped

    def decode(self, x, skipped):
        x = F.gelu(self.layers["up"](x))
        return self.layers["last"](torch.cat([x, skipped], 1))

    def forward(self, *inputs):
        if WORLD == 1:
            return self.decode(*self.encode(*inputs))
        return self.encode(*inputs) if RANK == 0 else self.decode(*inputs)


def get_parts(step):
    """Returns noisy images and the noise in them, for each micro-batch."""
    generator = torch.Generator().manual_seed(step)
    noise = torch.randn(BATCH_SIZE, 1, SIZE, SIZE, generator=generator)
    images = torch.randn(BATCH_SIZE, 1, 1, SIZE, generator=generator).cumsum(3) / 3 + noise
    return list(zip(images.chunk(MICRO_BATCHES), noise.chunk(MICRO_BATCHES), strict=True))


def loss_of(outputs, noise):
    return F.mse_loss(outputs, noise) / MICRO_BATCHES


def first_stage(model, parts):
    sent = [model(images) for images, _ in parts]
    for deep, skipped in sent:
        dist.send(deep.detach(), 1)
        dist.send(skipped.detach(), 1)
    for outputs in sent:
        gradients = [torch.empty_like(each) for each in outputs]
        for gradient in gradients:
            dist.recv(gradient, 1)
        if BUG == "what_is_skipped_gets_no_gradient":
            gradients[1].zero_()
        torch.autograd.backward(outputs, gradients)


def last_stage(model, parts):
    received = []
    for images, _ in parts:
        number = len(images)
        deep = torch.empty(number, 2 * WIDTH, SIZE // 2, SIZE // 2)
        skipped = torch.empty(number, WIDTH, SIZE, SIZE)
        for each in (deep, skipped):
            dist.recv(each, 0)
        received.append([deep, skipped])
    if BUG == "what_is_skipped_is_that_of_last_micro_batch":
        received = [[deep, received[-1][1].clone()] for deep, _ in received]
    for inputs, (_, noise) in zip(received, parts, strict=True):
        for each in inputs:
            each.requires_grad_()
        loss_of(model(*inputs), noise).backward()
        for each in inputs:
            dist.send(each.grad, 0)


def main():
    mesh = None
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("pp",))
    torch.manual_seed(61)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-4)
    with harness.training(model, optimizer, mesh=mesh):
        for step in range(2):
            optimizer.zero_grad()
            if WORLD == 1:
                for images, noise in get_parts(step):
                    loss_of(model(images), noise).backward()
            else:
                (first_stage if RANK == 0 else last_stage)(model, get_parts(step))
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
