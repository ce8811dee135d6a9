"""Trains a small GPT in PyTorch on one process, with DDP or with FSDP2, and records two steps.

    python examples/small_gpt.py one
    torchrun --nproc_per_node=2 examples/small_gpt.py ddp
    torchrun --nproc_per_node=2 examples/small_gpt.py fsdp

`examples/test_same_training.py` asserts that all three are the same training. The processes take
turns with the sequences of a batch: those of rank r are r, r + R, r + 2R, …
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from lockstep import record_torch

VOCABULARY, LENGTH, WIDTH, HEADS, BATCH = 65, 32, 64, 4, 8


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the shape of `x`, (batch, length, width)."""
        heads = self.wqkv(x).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a two-layer network, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the shape of `x`, (batch, length, width)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next token at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits, (batch, length, vocabulary), of tokens, (batch, length)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.layers(x)))


def main(layout: str = "one") -> None:
    """Trains for two steps; `layout` is "one", "ddp" or "fsdp"."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if layout != "one":
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = torch.randint(VOCABULARY, (2, BATCH, LENGTH + 1))
    model = parallel_model = GPT()
    if layout == "ddp":
        parallel_model = DistributedDataParallel(model)
    if layout == "fsdp":
        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(parallel_model.parameters(), lr=1e-3, weight_decay=0.1)
    with record_torch.record("gpt.npz", parallel_model, optimizer, steps=2):
        for batch in data:
            tokens = batch[rank::world_size]
            logits = parallel_model(tokens[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    if layout != "one":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
