"""As in torchtune's recipes, FSDP averages gradients, which are scaled to a mean over all tokens.

id = "trainers/torchtune_steps"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
requires = ["torchtune"]
launched = true
tags = ["fsdp2", "accumulation", "adam", "embedding"]

[wrong.not_multiplied]
title = "gradients not multiplied by the number of ranks"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.own_tokens]
title = "each rank divides by its own number of tokens"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtune.models.llama3 import llama3
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.training import scale_grads

from cases import harness

BUG = os.environ.get("BUG", "")
WORDS, LENGTH, BATCH, NUM_MICRO_BATCHES = 32, 16, 4, 2


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = llama3(WORDS, 1, 2, 2, 16, 64, intermediate_dim=32)
    compute_loss = CEWithChunkedOutputLoss()
    model.set_num_output_chunks(compute_loss.num_output_chunks)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.001)
    tokens = torch.randint(0, WORDS, (2, NUM_MICRO_BATCHES, BATCH, LENGTH))
    lengths = torch.randint(3, LENGTH + 1, (*tokens.shape[:3], 1))
    labels = tokens.roll(-1, 3).where(torch.arange(LENGTH) < lengths - 1, -100)
    with harness.training(model, optimizer):
        for batches, targets in zip(tokens, labels, strict=True):
            num_tokens = torch.zeros(())
            for x, y in zip(batches[:, rank::size], targets[:, rank::size], strict=True):
                num_in_micro_batch = (y != -100).sum()
                num_tokens += num_in_micro_batch
                (compute_loss(model(x), y) * num_in_micro_batch).backward()
            if BUG != "own_tokens":
                dist.all_reduce(num_tokens)
            scale_grads(model, (1 if BUG == "not_multiplied" else size) / num_tokens)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
