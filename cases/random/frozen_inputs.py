"""A reentrant checkpoint whose inputs need no gradient leaves its block without one.

id = "random/frozen_inputs"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = [
    "huggingface/transformers#21381",
    "mlfoundations/open_clip#573",
    "pytorch/pytorch#7617",
]
date = "2023-01"
tags = ["recomputation", "embedding", "adam"]

[wrong.inputs_come_from_frozen_embedding]
title = "the inputs come from a frozen embedding"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["first.*"] }

[wrong.inputs_are_detached_so_that_they_need]
title = "the inputs are detached, so that they need a gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["first.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Tagger(nn.Module):
    """The embedding is frozen; the blocks and the head are trained."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 12)
        self.embedding.requires_grad_(False)
        self.first = nn.Sequential(nn.Linear(12, 12), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(12, 12), nn.Tanh())
        self.head = nn.Linear(12, 9)

    def forward(self, tokens):
        x = self.embedding(tokens)
        if BUG == "inputs_come_from_frozen_embedding":
            x = checkpoint(self.first, x, use_reentrant=True)
        else:
            x = checkpoint(self.first, x, use_reentrant=False)
        if BUG == "inputs_are_detached_so_that_they_need":
            x = x.detach().requires_grad_()
        x = checkpoint(self.second, x, use_reentrant=False)
        return self.head(x)


def average_gradients(model):
    for weight in model.parameters():
        if WORLD > 1 and weight.grad is not None:
            dist.all_reduce(weight.grad)
            weight.grad /= WORLD


torch.manual_seed(0)
if WORLD > 1:
    dist.init_process_group("gloo")
model = Tagger()
trained = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.Adam(trained, lr=0.01)
with harness.training(model, optimizer):
    for step in range(2):
        tokens = torch.randint(9, (8, 5), generator=torch.Generator().manual_seed(step))
        tokens = tokens[RANK::WORLD]
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), (tokens * 2 % 9).flatten())
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
