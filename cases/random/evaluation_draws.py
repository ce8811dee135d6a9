"""An evaluation between two steps changes the random state of the training.

id = "random/evaluation_draws"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["huggingface/diffusers#175", "huggingface/diffusers#7991"]
date = "2022-08"
tags = ["ddp", "sgd"]

[wrong.evaluation_sets_seed]
title = "the evaluation sets the seed"
place = { node = "between", step = 0, ranks = "all", tensors = "all" }

[wrong.rank_0_alone_evaluates_with_training_state]
title = "rank 0 alone evaluates with the training's state"
place = { node = "between", step = 0, ranks = [0], tensors = "all" }

[wrong.state_is_restored_on_rank_0_only]
title = "the state is restored on rank 0 only"
place = { node = "between", step = 0, ranks = [1], tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

GLOBAL_BATCH_SIZE = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 20)
        self.second = nn.Linear(20, 3)

    def forward(self, x):
        x = torch.relu(self.first(x))
        keep = torch.rand(GLOBAL_BATCH_SIZE, 20) < 0.5
        return self.second(2 * x * keep[RANK::WORLD])


def evaluate(net):
    """Scores some random inputs."""
    if BUG == "rank_0_alone_evaluates_with_training_state" and RANK != 0:
        return
    state = torch.get_rng_state()
    torch.manual_seed(5)
    if BUG == "rank_0_alone_evaluates_with_training_state":
        torch.set_rng_state(state)
    x = torch.randn(4, 8)
    with torch.no_grad():
        net.second(torch.relu(net.first(x)))
    kept = BUG == "state_is_restored_on_rank_0_only" and RANK == 0
    if not BUG or kept:
        torch.set_rng_state(state)


torch.manual_seed(0)
net = model = Net()
if WORLD > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with harness.training(model, optimizer):
    for step in range(3):
        x = torch.randn(GLOBAL_BATCH_SIZE, 8, generator=torch.Generator().manual_seed(step))
        y = x[:, :3].argmax(dim=1)
        loss = nn.functional.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        evaluate(net)
if WORLD > 1:
    dist.destroy_process_group()
