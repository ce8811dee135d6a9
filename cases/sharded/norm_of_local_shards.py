"""A reinforcement learner clips the gradients of sharded weights by a norm that it computes itself.

id = "sharded/norm_of_local_shards"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["areal-project/AReaL#312"]
date = "2025-09"
tags = ["fsdp2", "gathered", "sgd"]

[wrong.norm_is_that_of_own_shards]
title = "the norm is that of the own shards"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.norms_of_ranks_are_averaged]
title = "norms of the ranks are averaged"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, LARGEST = 16, 0.1


@torch.no_grad()
def clip(weights):
    grads = [w.grad.to_local() if isinstance(w.grad, DTensor) else w.grad for w in weights]
    square = torch.stack([grad.square().sum() for grad in grads]).sum()
    if BUG == "norms_of_ranks_are_averaged":
        norm = square.sqrt()
        dist.all_reduce(norm)
        norm /= WORLD
    else:
        if WORLD > 1 and BUG != "norm_is_that_of_own_shards":
            dist.all_reduce(square)
        norm = square.sqrt()
    for grad in grads:
        grad.mul_((LARGEST / (norm + 1e-6)).clamp(max=1))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(82)
    policy = nn.Sequential(
        nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 4)
    )
    if WORLD > 1:
        mesh = init_device_mesh("cpu", (WORLD,))
        fully_shard(policy[0], mesh=mesh)
        fully_shard(policy, mesh=mesh)
    weights = list(policy.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.8, momentum=0.9)
    with harness.training(policy, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            states = torch.randn(BATCH_SIZE, 6, generator=generator)
            actions = torch.randint(4, (BATCH_SIZE,), generator=generator)
            advantages = states[:, 0] - states[:, 1] * actions
            old = torch.full((BATCH_SIZE,), 0.25)
            parts = [whole.chunk(WORLD)[RANK] for whole in (states, actions, advantages, old)]
            states, actions, advantages, old = parts
            optimizer.zero_grad()
            chosen = policy(states).softmax(-1).gather(1, actions[:, None])[:, 0]
            ratio = chosen / old
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            (-gain.mean()).backward()
            clip(weights)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
