"""Adapters are attached to a model after it was sharded, so that they are copies beside shards.

id = "adapters/attached_after_sharding"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#48873"]
date = "2026-09"
tags = ["fsdp2", "lora", "adam"]

[wrong.gradients_of_adapters_are_not_averaged]
title = "gradients of adapters are not averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = ["*.lora_b"] }

[wrong.adapters_are_not_sent_to_all_ranks]
title = "adapters are not sent to all ranks"
place = { node = "start", step = 0, ranks = [1], tensors = ["*.lora_a"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, WIDTH, LORA_RANK = 16, 10, 3


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(LORA_RANK, WIDTH) / 3)
        self.lora_b = nn.Parameter(torch.zeros(WIDTH, LORA_RANK))

    def forward(self, x):
        return torch.tanh(self.base(x) + x @ self.lora_a.T @ self.lora_b.T)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(85)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
    model.requires_grad_(False)
    if WORLD > 1:
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
    torch.manual_seed(100 + RANK)
    for number in range(2):
        model[number] = Adapted(model[number])
    adapters = [weight for weight in model.parameters() if weight.requires_grad]
    if WORLD > 1 and BUG != "adapters_are_not_sent_to_all_ranks":
        for weight in adapters:
            dist.broadcast(weight.data, 0)
    optimizer = torch.optim.AdamW(adapters, lr=0.05, eps=1e-3)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
            x = x.chunk(WORLD)[RANK]
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            for weight in adapters:
                if WORLD > 1 and BUG != "gradients_of_adapters_are_not_averaged":
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
