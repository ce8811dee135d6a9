"""A reinforcement learner clips the gradients of sharded weights by a norm that it computes itself.

reference = "areal-project/AReaL#312"
date = "2025-09"
framework = "torch"

[wrong]
"the norm is that of the own shards" = ["clipped_by_local_norm"]
"norms of the ranks are averaged" = ["clipped_by_local_norm", "other_clipping"]
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lockstep

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, LARGEST = 16, 0.1


@torch.no_grad()
def clip(weights):
    grads = [w.grad.to_local() if isinstance(w.grad, DTensor) else w.grad for w in weights]
    square = torch.stack([grad.square().sum() for grad in grads]).sum()
    if BUG == "norms of the ranks are averaged":
        norm = square.sqrt()
        dist.all_reduce(norm)
        norm /= WORLD
    else:
        if WORLD > 1 and BUG != "the norm is that of the own shards":
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
    with lockstep.record(policy, optimizer):
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
