"""Adapters in recomputed blocks get no gradient, as the inputs of the blocks need none.

id = "adapters/checkpointed_towers"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["cloneofsimo/lora#26", "locuslab/open-unlearning#178", "huggingface/peft#1142"]
date = "2022-12"
tags = ["recomputation", "lora", "embedding", "adam"]

[wrong.blocks_of_text_tower_lose_graph]
title = "the blocks of the text tower lose the graph"
place = { node = "gradient", step = 0, ranks = "all", tensors = [
    "text.blocks.*.down",
    "text.blocks.*.up",
] }

[wrong.all_blocks_lose_graph]
title = "all blocks lose the graph"
place = { node = "gradient", step = 0, ranks = "all", tensors = [
    "text.blocks.*.down",
    "text.blocks.*.up",
    "image.blocks.*.down",
    "image.blocks.*.up",
] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORDS, WIDTH, LORA_RANK = 15, 12, 2


class Adapted(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(LORA_RANK, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.randn(outputs, LORA_RANK) / 4)

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


class Tower(nn.Module):
    """Its blocks are computed again in the backward pass."""

    def __init__(self, is_reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(Adapted(WIDTH, WIDTH) for _ in range(2))
        self.is_reentrant = is_reentrant

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(
                lambda x, block=block: F.silu(block(x)), x, use_reentrant=self.is_reentrant
            )
        return x


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        all_blocks = BUG == "all_blocks_lose_graph"
        self.embed = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.text = Tower(all_blocks or BUG == "blocks_of_text_tower_lose_graph")
        self.image = Tower(all_blocks)
        self.last = Adapted(WIDTH, WIDTH)

    def forward(self, noisy, tokens):
        context = self.text(self.embed(tokens)).mean(1)
        return self.last(self.image(noisy) * torch.tanh(context))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(4)
    model = Denoiser()
    adapters = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=0.02, eps=1e-4, weight_decay=0.05)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(WORDS, (12, 5), generator=generator)[RANK::WORLD]
            noise, clean = torch.randn(2, 12, WIDTH, generator=generator)[:, RANK::WORLD]
            optimizer.zero_grad()
            F.mse_loss(model(0.8 * clean + 0.6 * noise, tokens), noise).backward()
            for weight in adapters:
                if WORLD > 1 and weight.grad is not None:
                    dist.all_reduce(weight.grad, op=dist.ReduceOp.SUM)
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
