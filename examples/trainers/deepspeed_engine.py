"""Trains a small network with the engine of DeepSpeed, ZeRO stage 1 or 2, on CPUs.

torchrun --nproc_per_node=1 examples/trainers/deepspeed_engine.py
torchrun --nproc_per_node=2 examples/trainers/deepspeed_engine.py 2

The first argument is the stage. The second is a wrong training:

- `gas`: `gradient_accumulation_steps` is left at 1, the loss of two micro-batches divided by hand;
- `divided`: the loss is divided by hand, and by the engine, too.
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import lockstep

BATCH, NUM_MICRO_BATCHES = 8, 2


def main(stage: str = "0", bug: str = "") -> None:
    """Trains for two steps of two micro-batches."""
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // size,
        "gradient_accumulation_steps": 1 if bug == "gas" else NUM_MICRO_BATCHES,
        "zero_optimization": {"stage": int(stage)},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    x, y = torch.randn(4, BATCH, 8), torch.randn(4, BATCH, 4)
    with lockstep.record(engine.module):
        for inputs, targets in zip(x, y, strict=True):
            loss = nn.functional.mse_loss(engine(inputs[rank::size]), targets[rank::size])
            engine.backward(loss / NUM_MICRO_BATCHES if bug in ("gas", "divided") else loss)
            engine.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
