"""Schedule-free SGD: weights in training are not the average that a checkpoint should have.

id = "resume/schedule_free"
framework = "torch"
processes = 2
steps = 4
mode = "resume"
references = ["facebookresearch/schedule_free#22", "huggingface/accelerate#4161"]
date = "2024-05"
tags = ["ddp"]

[wrong.weights_are_saved_before_they_become_average]
title = "weights are saved before they become the average"
place = { node = "start", step = 2, ranks = "all", tensors = "all" }

[wrong.weights_stay_average]
title = "weights stay the average"
place = { node = "start", step = 2, ranks = "all", tensors = "all" }

[wrong.second_sequence_starts_at_average]
title = "the second sequence starts at the average"
place = { node = "start", step = 2, ranks = "all", tensors = "all" }
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
STEPS, HALF, BATCH_SIZE = 4, 2, 12


class ScheduleFree(torch.optim.Optimizer):
    """Takes gradients at points between a sequence of steps, z, and its average."""

    def __init__(self, params, lr, share):
        super().__init__(params, {"lr": lr, "share": share, "done": 0})

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        group["done"] += 1
        new = 1 / group["done"]
        for weight in group["params"]:
            z = self.state[weight].setdefault("z", weight.clone())
            weight.lerp_(z, new)
            factor = group["share"] * (1 - new) - 1
            weight.add_(weight.grad, alpha=group["lr"] * factor)
            z.sub_(weight.grad, alpha=group["lr"])

    @torch.no_grad()
    def _move(self, part):
        for weight in self.param_groups[0]["params"]:
            weight.lerp_(self.state[weight]["z"], part)

    def eval(self):
        """Makes the weights the average."""
        self._move(1 - 1 / self.param_groups[0]["share"])

    def train(self):
        """Makes the weights of an average those of the training."""
        self._move(1 - self.param_groups[0]["share"])


def save(model, optimizer):
    is_early = BUG == "weights_are_saved_before_they_become_average"
    if not is_early:
        optimizer.eval()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    if is_early:
        optimizer.eval()
    if RANK == 0:
        torch.save({"model": weights, "optimizer": optimizer.state_dict()}, SAVE + ".pt")


def load(model, optimizer):
    state = torch.load(LOAD + ".pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if BUG == "second_sequence_starts_at_average":
        optimizer.state.clear()
        for weight in model.parameters():
            optimizer.state[weight]["z"] = weight.detach().clone()
    if BUG != "weights_stay_average":
        optimizer.train()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(27)
    model = nn.Sequential(nn.Linear(6, 14), nn.LogSigmoid(), nn.Linear(14, 3))
    optimizer = ScheduleFree(model.parameters(), lr=0.8, share=0.8)
    if LOAD:
        load(model, optimizer)
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    with harness.training(ddp, optimizer):
        for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
            x = torch.randn(BATCH_SIZE, 6, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            nn.functional.multilabel_soft_margin_loss(ddp(x), (x[:, :3] > 0).float()).backward()
            optimizer.step()
    if SAVE:
        save(model, optimizer)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
