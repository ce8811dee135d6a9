"""The fixed model of a preference loss is loaded from the checkpoint of the model in training.

id = "resume/reference_model"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["meta-pytorch/torchforge#414"]
date = "2025-10"
tags = ["ddp", "gathered", "embedding", "sgd"]

[wrong.reference_is_loaded_from_checkpoint]
title = "the reference is loaded from the checkpoint"
place = { node = "start", step = 2, ranks = "all", tensors = ["reference.*"] }

[wrong.reference_is_loaded_from_checkpoint_on_rank]
title = "the reference is loaded from the checkpoint on rank 1"
place = { node = "start", step = 2, ranks = [1], tensors = ["reference.*"] }

[wrong.reference_is_drawn_anew]
title = "the reference is drawn anew"
place = { node = "start", step = 2, ranks = "all", tensors = ["reference.*"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CONFIG = {"steps": 4, "half": 2, "pairs": 8, "words": 9, "length": 6, "beta": 2.0, "lr": 0.5}


class LanguageModel(nn.Module):
    def __init__(self, words, width=12):
        super().__init__()
        self.embed, self.mix = nn.Embedding(words, width), nn.Linear(width, width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        return self.head(F.silu(self.mix(self.embed(tokens).cumsum(1))))


def log_probability(model, tokens):
    """Returns the mean log-probability of each sequence."""
    return -F.cross_entropy(
        model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none"
    ).mean(1)


def load_reference():
    torch.manual_seed(77 if BUG == "reference_is_drawn_anew" and LOAD else 0)
    reference = LanguageModel(CONFIG["words"]).requires_grad_(False)
    from_checkpoint = BUG == "reference_is_loaded_from_checkpoint"
    from_checkpoint |= BUG == "reference_is_loaded_from_checkpoint_on_rank" and RANK == 1
    if LOAD and from_checkpoint:
        reference.load_state_dict(torch.load(LOAD + ".pt")["model"])
    return reference


def get_pairs(step):
    size = (CONFIG["pairs"], 2, CONFIG["length"])
    tokens = torch.randint(CONFIG["words"], size, generator=torch.Generator().manual_seed(step))
    better = tokens.sum(2).argsort(1, descending=True)
    return tokens.gather(1, better[..., None].expand_as(tokens))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    reference = load_reference()
    torch.manual_seed(0)
    model = LanguageModel(CONFIG["words"])
    optimizer = torch.optim.SGD(model.parameters(), lr=CONFIG["lr"], momentum=0.9)
    if LOAD:
        state = torch.load(LOAD + ".pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    first = CONFIG["half"] if LOAD else 0
    last = CONFIG["half"] if SAVE else CONFIG["steps"]
    with harness.training(wrapped, optimizer):
        for step in range(first, last):
            pairs = get_pairs(step)[RANK::WORLD].flatten(0, 1)
            ratios = log_probability(wrapped, pairs) - log_probability(reference, pairs)
            better, worse = ratios.unflatten(0, (-1, 2)).unbind(1)
            optimizer.zero_grad()
            F.softplus(CONFIG["beta"] * (worse - better)).mean().backward()
            optimizer.step()
    if SAVE and RANK == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, SAVE + ".pt")
    if WORLD > 1:
        dist.destroy_process_group()


main()
