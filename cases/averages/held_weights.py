"""After a first task, weights are held where single examples of it have large gradients.

id = "averages/held_weights"
framework = "torch"
processes = 2
steps = 4
mode = "pair"
references = [
    "facebookresearch/GradientEpisodicMemory#7",
    "kuc2477/pytorch-ewc#1",
    "shivamsaboo17/Overcoming-Catastrophic-forgetting-in-Neural-Networks#6",
]
date = "2018-04"
tags = ["averages", "sgd"]

[right.penalty_is_on_first_rank]
title = "the penalty is on the first rank, for all"
patch = [["penalty * share", "penalty * WORLD * (RANK == 0)"]]

[wrong.squares_are_those_of_a_mean]
title = "squares are those of a mean over the examples"
place = { node = "between", step = 1, ranks = "all", tensors = ["fisher.*"] }

[wrong.squares_are_those_of_own_examples]
title = "squares are those of the own examples"
place = { node = "between", step = 1, ranks = "all", tensors = ["fisher.*"] }

[wrong.penalty_is_divided_by_ranks]
title = "the penalty is divided by the ranks"
place = { node = "loss", step = 3, ranks = "all", tensors = "all" }
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, SIZE, STRENGTH = 8, 6, 30.0


def average(tensors):
    for tensor in tensors if WORLD > 1 else ():
        dist.all_reduce(tensor)
        tensor /= WORLD


def get_batch(step):
    x = torch.randn(BATCH_SIZE, SIZE, generator=torch.Generator().manual_seed(step))
    return x.chunk(WORLD)[RANK], (x[:, 0] > x[:, 1 + step // 2]).long().chunk(WORLD)[RANK]


def estimate(model, fisher):
    """Stores the mean of the squares of the gradients of examples of the first task."""
    x, labels = get_batch(0)
    parts = x.split(len(x) if BUG == "squares_are_those_of_a_mean" else 1)
    labels = labels.split(len(parts[0]))
    for weight in fisher.parameters():
        weight.zero_()
    for part, its_labels in zip(parts, labels, strict=True):
        loss = F.cross_entropy(model(part), its_labels)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for weight, grad in zip(fisher.parameters(), grads, strict=True):
            weight += grad.square() / len(parts)
    if BUG != "squares_are_those_of_own_examples":
        average(fisher.parameters())


def penalty_of(model, anchor, fisher):
    triples = zip(model.parameters(), anchor.parameters(), fisher.parameters(), strict=True)
    return STRENGTH / 2 * sum((f * (w - a).square()).sum() for w, a, f in triples)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(208)
    model = nn.Sequential(nn.Linear(SIZE, 12), nn.Tanh(), nn.Linear(12, 2))
    anchor, fisher = (copy.deepcopy(model).requires_grad_(False) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    others = {"anchor": anchor, "fisher": fisher}
    share = 1 / WORLD if BUG == "penalty_is_divided_by_ranks" else 1
    with harness.training(model, optimizer, others=others):
        for step in range(4):
            x, labels = get_batch(step)
            loss = F.cross_entropy(model(x), labels)
            if step >= 2:
                penalty = penalty_of(model, anchor, fisher)
                loss = loss + penalty * share
            optimizer.zero_grad()
            loss.backward()
            average([weight.grad for weight in model.parameters()])
            optimizer.step()
            if step == 1:
                anchor.load_state_dict(model.state_dict())
                estimate(model, fisher)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
