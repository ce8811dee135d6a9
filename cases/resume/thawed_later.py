"""Layers are thawed one after another, by the number of the epoch; a resumed run counts from 0.

id = "resume/thawed_later"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["allenai/allennlp#2523", "chainer/chainer#3800"]
date = "2017-11"
tags = ["sgd"]

[wrong.first_epoch_after_load_is_taken_for_first]
title = "the first epoch after the load is taken for the first of all"
place = { node = "start", step = 2, ranks = "all", tensors = ["layers.*"] }

[wrong.epochs_are_counted_from_load]
title = "epochs are counted from the load"
place = { node = "start", step = 2, ranks = "all", tensors = ["layers.*"] }

[wrong.layers_that_were_frozen_at_first]
title = "layers that were frozen at first have no state"
place = { node = "start", step = 2, ranks = "all", tensors = ["layers.1.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EPOCHS, HALF, BATCH_SIZE, WIDTH, CLASSES = 4, 2, 18, 8, 3


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            x = x + nn.functional.hardswish(layer(x))
        return self.head(x)


def thaw(model, epoch, has_begun):
    """Trains the head in the first epoch, and one layer more in each of the next ones."""
    if BUG == "first_epoch_after_load_is_taken_for_first" and not has_begun:
        epoch = 0
    elif LOAD and BUG == "epochs_are_counted_from_load":
        epoch -= HALF
    for place, layer in enumerate(reversed(model.layers)):
        layer.requires_grad_(place < epoch)


def load(model, optimizer):
    state = torch.load(LOAD + ".pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if BUG == "layers_that_were_frozen_at_first":
        for weight in model.layers.parameters():
            optimizer.state.pop(weight, None)
    return state["epoch"]


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(13)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    start = load(model, optimizer) if LOAD else 0
    with harness.training(model, optimizer):
        for epoch in range(start, HALF if SAVE else EPOCHS):
            thaw(model, epoch, has_begun=epoch > start)
            x = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(epoch))
            own = x[RANK::WORLD]
            optimizer.zero_grad()
            loss = nn.functional.multi_margin_loss(model(own), own[:, :CLASSES].argmax(1), p=2)
            loss.backward()
            for weight in model.parameters():
                if WORLD > 1 and weight.grad is not None:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
    if SAVE and RANK == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": HALF}
        torch.save(state, SAVE + ".pt")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
