"""Within `loss_parallel`, only a cross-entropy has a right gradient of a split log-softmax.

id = "losses/parallel_entropy"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#190746", "pytorch/pytorch#172932"]
date = "2026-07"
tags = ["tensor_parallel", "sgd"]

[wrong.entropy_takes_split_logits]
title = "the entropy takes split logits"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.gradients_of_gathered_logits_are_added]
title = "gradients of gathered logits are added"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }
"""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, FEATURES, WIDTH, CLASSES, BONUS = 12, 8, 16, 10, 0.5


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, x):
        return self.head(x + self.down(F.gelu(self.up(x))))


def entropy_of(logits):
    logs = F.log_softmax(logits, -1)
    return -(logs.exp() * logs).sum(-1).mean()


def compute_loss(logits, targets):
    """Returns the cross-entropy with a bonus for uncertain predictions."""
    whole = logits
    if WORLD > 1 and BUG != "entropy_takes_split_logits":
        is_sum = BUG == "gradients_of_gathered_logits_are_added"
        whole = logits.full_tensor(grad_placements=[Partial() if is_sum else Replicate()])
    entropy, loss = entropy_of(whole), F.cross_entropy(logits, targets)
    if WORLD > 1:
        loss = loss.full_tensor()
        entropy = entropy if whole is not logits else entropy.full_tensor()
    return loss - BONUS * entropy


def main():
    torch.manual_seed(33)
    model, parallel = Classifier(), contextlib.nullcontext
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": head}
        parallelize_module(model, mesh, plan)
        parallel = loss_parallel
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, FEATURES, generator=torch.Generator().manual_seed(step))
            targets = (3 * x[:, :3].sigmoid()).sum(1).long()
            if WORLD > 1:
                targets = distribute_tensor(targets, mesh, [Replicate()])
            optimizer.zero_grad()
            with parallel():
                compute_loss(model(x), targets).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
