"""The auxiliary loss of a router counts once for each rank, or balances the experts of each alone.

id = "losses/router_auxiliary"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "huggingface/transformers#48690",
    "pytorch/torchtitan#3000",
    "NVIDIA-NeMo/Automodel#1408",
]
date = "2026-09"
tags = ["ddp", "experts", "embedding", "sgd"]

[wrong.factor_of_ranks_is_on_auxiliary_loss_too]
title = "the factor of the ranks is on the auxiliary loss, too"
place = { node = "loss", step = 0, ranks = "all", tensors = ["router.*", "embed.*"] }

[wrong.fractions_of_own_rank]
title = "fractions of the own rank"
place = { node = "loss", step = 0, ranks = "all", tensors = ["router.*", "embed.*"] }

[wrong.auxiliary_loss_is_detached]
title = "the auxiliary loss is detached"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["router.*", "embed.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCABULARY, LENGTH, WIDTH, EXPERTS, COEFFICIENT = 13, 6, 16, 4, 0.5


class MixtureModel(nn.Module):
    """Embedding, one layer of experts of which each token gets one, and a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, tokens):
        x = self.embed(tokens)
        chances = self.router(x).softmax(-1)
        gate = chances * F.one_hot(chances.argmax(-1), EXPERTS)
        x = x + torch.einsum("ble,blw,ewv->blv", gate, x, self.experts)
        return self.head(x), chances


def balance(chances):
    """Returns the loss that is least if all experts get equally many tokens of the batch."""
    fractions = F.one_hot(chances.argmax(-1), EXPERTS).float().mean((0, 1))
    if WORLD > 1 and BUG != "fractions_of_own_rank":
        dist.all_reduce(fractions)
        fractions = fractions / WORLD
    return EXPERTS * (fractions * chances.mean((0, 1))).sum()


def loss_of(logits, chances, labels):
    """Returns the loss of a rank, whose gradient DDP averages over the ranks."""
    num_tokens = (labels != -100).sum()
    if WORLD > 1:
        dist.all_reduce(num_tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens
    auxiliary = COEFFICIENT * balance(chances)
    if BUG == "auxiliary_loss_is_detached":
        auxiliary = auxiliary.detach()
    if BUG == "factor_of_ranks_is_on_auxiliary_loss_too":
        return WORLD * (loss + auxiliary)
    return WORLD * loss + auxiliary


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = MixtureModel()
    tokens = torch.randint(VOCABULARY, (2, 8, LENGTH + 1))
    tokens[:, 1::2, :4] = 5
    labels = tokens[..., 1:].clone()
    labels[:, ::2, 2:] = -100
    if WORLD > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            optimizer.zero_grad()
            logits, chances = model(tokens[step, RANK::WORLD, :-1])
            loss_of(logits, chances, labels[step, RANK::WORLD]).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
