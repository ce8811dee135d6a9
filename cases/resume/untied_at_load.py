"""Loading a checkpoint makes new weights, so that embedding and output layer are no longer one.

id = "resume/untied_at_load"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["huggingface/accelerate#1204", "huggingface/transformers#11682"]
date = "2023-03"
tags = ["ddp", "embedding", "sgd"]

[wrong.not_tied_again]
title = "not tied again"
place = { node = "start", step = 2, ranks = "all", tensors = ["embed.weight", "head.weight"] }

[wrong.output_layer_stays_new]
title = "the output layer stays new"
place = { node = "start", step = 2, ranks = "all", tensors = ["head.weight"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, HALF, BATCH, WORDS, WIDTH = 4, 2, 4, 18, 12


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.embed.weight

    def forward(self, words):
        x = self.embed(words)
        before = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return self.head(torch.tanh(self.mix(torch.cat([x, before], -1))))


def load(model):
    state = torch.load(LOAD + ".pt")
    if BUG == "output_layer_stays_new":
        del state["head.weight"]
        model.head.weight = nn.Parameter(torch.randn(WORDS, WIDTH) / 4)
        model.load_state_dict(state, strict=False)
        return
    model.load_state_dict(state, assign=True)
    if BUG != "not_tied_again":
        model.tie()


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(31)
model = LanguageModel()
if LOAD:
    load(model)
ddp = DistributedDataParallel(model) if WORLD > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
with harness.training(ddp, optimizer):
    for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
        data = torch.Generator().manual_seed(step)
        text = torch.randint(WORDS, (BATCH, 9), generator=data)[RANK::WORLD]
        optimizer.zero_grad()
        logits = ddp(text[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
if SAVE and RANK == 0:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save(state, SAVE + ".pt")
if WORLD > 1:
    dist.destroy_process_group()
