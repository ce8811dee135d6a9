"""The loss is divided by all tokens, so that FSDP must add gradients and not average them.

id = "sharded/gradient_divide_factor"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/torchtitan#2318", "pytorch/torchtitan#2206"]
date = "2026-02"
tags = ["fsdp2", "embedding", "sgd"]

[wrong.sums_are_divided_by_ranks_again]
title = "the sums are divided by the ranks again"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.only_root_adds_blocks_average]
title = "only the root adds, the blocks average"
place = { node = "sum", step = 0, ranks = "all", tensors = ["blocks.*"] }

[wrong.each_rank_divides_by_its_own_tokens]
title = "each rank divides by its own tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCABULARY, IGNORED = 24, -100


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Decoder(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.output = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(x)


def shard(model):
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp_shard",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if BUG == "sums_are_divided_by_ranks_again":
                continue
            if BUG == "only_root_adds_blocks_average" and module is not model:
                continue
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no scaled sums.


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (8, 11), generator=generator)
    labels = tokens[:, 1:].clone()
    for row, length in enumerate([10, 3, 9, 2, 8, 4, 10, 1]):
        labels[row, length:] = IGNORED
    return tokens[RANK::WORLD, :-1], labels[RANK::WORLD]


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Decoder()
    if WORLD > 1:
        shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            tokens, labels = batch(step)
            valid = (labels != IGNORED).sum()
            if WORLD > 1 and BUG != "each_rank_divides_by_its_own_tokens":
                dist.all_reduce(valid)
            logits = model(tokens).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
            (loss / valid).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
