"""A vocabulary that ranks cannot divide evenly: the last part is filled up in the softmax.

id = "parallel/uneven_vocabulary"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#1754", "apple/ml-cross-entropy#59"]
date = "2025-08"
tags = ["recurrent", "gathered", "embedding", "sgd"]

[wrong.words_that_fill_up_part_are_in_softmax]
title = "words that fill up a part are in the softmax"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.parts_are_taken_to_be_equal]
title = "parts are taken to be equal"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORDS, WIDTH, LENGTH = 13, 12, 7
LARGEST = -(-WORDS // WORLD)  # Words of each rank but the last.


class SumOverRanks(torch.autograd.Function):
    """Each rank computes with the sum, and passes its gradient to the own summand."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Model(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        head = torch.randn(WORDS, WIDTH) / 2
        self.mesh = mesh
        self.head = nn.Parameter(distribute_tensor(head, mesh, [Shard(0)]) if mesh else head)

    def forward(self, tokens):
        x = self.cell(self.embed(tokens))[0]
        if self.mesh is None:
            return x @ self.head.T
        x = DTensor.from_local(x, self.mesh, [Replicate()])
        return (x @ self.head.T).to_local()  # The logits of the own words.


def loss_of(logits, targets):
    first = RANK * LARGEST
    if BUG == "parts_are_taken_to_be_equal":
        first = RANK * (WORDS // WORLD)
    if BUG == "words_that_fill_up_part_are_in_softmax":
        logits = F.pad(logits, (0, LARGEST - logits.shape[-1]))
    place = targets - first
    is_own = (place >= 0) & (place < logits.shape[-1])
    target = logits.gather(-1, place.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    target = SumOverRanks.apply(target * is_own)
    return (SumOverRanks.apply(logits.exp().sum(-1)).log() - target).mean()


def main():
    mesh, layout = None, {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        layout = {"mesh": mesh, "dims": {"inputs": "b s", "outputs": "b s v[tp]"}}
    torch.manual_seed(21)
    model = Model(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.8, nesterov=True)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(WORDS, (8, LENGTH + 1), generator=generator)
            optimizer.zero_grad()
            loss_of(model(text[:, :-1]), text[:, 1:]).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
