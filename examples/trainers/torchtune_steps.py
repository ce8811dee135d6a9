"""Trains a small Llama as torchtune's distributed recipes do: FSDP2, gradients scaled at the end.

torchrun --nproc_per_node=1 examples/trainers/torchtune_steps.py
torchrun --nproc_per_node=2 examples/trainers/torchtune_steps.py

Each loss is multiplied by its number of tokens; `scale_grads` divides the gradients of all
micro-batches by the number of tokens of all ranks. FSDP has averaged them over the ranks. Two wrong
trainings: `mean` as argument forgets that average, and with `local` each rank divides by its own
number of tokens.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtune.models.llama3 import llama3
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.training import scale_grads

import lockstep

WORDS, LENGTH, BATCH, NUM_MICRO_BATCHES = 32, 16, 4, 2


def main(bug: str = "") -> None:
    """Trains for two steps of two micro-batches."""
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
    with lockstep.record(model, optimizer):
        for batches, targets in zip(tokens, labels, strict=True):
            num_tokens = torch.zeros(())
            for x, y in zip(batches[:, rank::size], targets[:, rank::size], strict=True):
                num_in_micro_batch = (y != -100).sum()
                num_tokens += num_in_micro_batch
                (compute_loss(model(x), y) * num_in_micro_batch).backward()
            if bug != "local":
                dist.all_reduce(num_tokens)
            scale_grads(model, (1 if bug == "mean" else size) / num_tokens)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
