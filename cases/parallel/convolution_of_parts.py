"""A causal convolution of a sequence that is split over ranks needs the last places before a part.

id = "parallel/convolution_of_parts"
framework = "torch"
processes = 3
steps = 2
mode = "pair"
references = ["state-spaces/mamba#597", "state-spaces/mamba#664", "open-lm-engine/lm-engine#451"]
date = "2024-10"
tags = ["embedding", "sgd"]

[wrong.each_part_begins_with_zeros]
title = "each part begins with zeros"
place = { node = "outputs", step = 0, ranks = [1, 2], tensors = ["mixers.0"] }

[wrong.places_of_other_ranks_get_no_gradient]
title = "places of other ranks get no gradient"
place = { node = "gradient", step = 0, ranks = [0, 1], tensors = ["embed.*", "mixers.0.*"] }

[wrong.first_part_begins_with_end_of_last]
title = "the first part begins with the end of the last"
place = { node = "outputs", step = 0, ranks = [0], tensors = ["mixers.0"] }
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
WORDS, WIDTH, LENGTH, BATCH_SIZE, TAPS = 11, 8, 12, 5, 4


def pass_around(x, shift):
    """Sends an array to the rank that is `shift` further on a ring, and returns the received."""
    received = torch.empty_like(x)
    works = [
        dist.isend(x.contiguous(), (RANK + shift) % WORLD),
        dist.irecv(received, (RANK - shift) % WORLD),
    ]
    for work in works:
        work.wait()
    return received


class FromTheRankBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        received = pass_around(x, 1)
        if RANK == 0 and BUG != "first_part_begins_with_end_of_last":
            received.zero_()
        return received

    @staticmethod
    def backward(ctx, gradient):
        if RANK == 0 and BUG != "first_part_begins_with_end_of_last":
            gradient = torch.zeros_like(gradient)
        if BUG == "places_of_other_ranks_get_no_gradient":
            return torch.zeros_like(gradient)
        return pass_around(gradient, -1)


class Mixer(nn.Module):
    """A gated convolution for each channel."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.taps = nn.Parameter(torch.randn(WIDTH, 1, TAPS) / 2)

    def forward(self, x):
        gate, x = torch.sigmoid(self.gate(x)), x.transpose(1, 2)
        if WORLD == 1 or BUG == "each_part_begins_with_zeros":
            x = F.pad(x, (TAPS - 1, 0))
        else:
            before = FromTheRankBefore.apply(x[..., 1 - TAPS :].contiguous())
            x = torch.cat([before, x], 2)
        return gate * F.conv1d(x, self.taps, groups=WIDTH).transpose(1, 2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens)
        for mixer in self.mixers:
            x = x + F.silu(mixer(x))
        return self.head(x)


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
        layout = {"mesh": mesh, "dims": "b s[cp]"}
    torch.manual_seed(60)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9, nesterov=True)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(WORDS, (BATCH_SIZE, LENGTH + 1), generator=generator)
            tokens, targets = (part.chunk(WORLD, 1)[RANK] for part in (text[:, :-1], text[:, 1:]))
            losses = F.cross_entropy(
                model(tokens).flatten(0, 1), targets.flatten(), reduction="sum"
            )
            optimizer.zero_grad()
            (losses / (BATCH_SIZE * LENGTH)).backward()
            for weight in model.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
