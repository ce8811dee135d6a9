"""The engine of DeepSpeed divides each loss by the number of micro-batches that it is told.

id = "trainers/deepspeed_engine"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
requires = ["deepspeed", "ninja"]
launched = true
tags = ["accumulation", "adam"]

[wrong.accumulation_unset]
title = "gradient_accumulation_steps left at 1, the loss divided by hand"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }

[wrong.divided_twice]
title = "the loss is divided by the number of micro-batches, as the engine does"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
BATCH, NUM_MICRO_BATCHES = 8, 2


def main():
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // size,
        "gradient_accumulation_steps": 1 if BUG == "accumulation_unset" else NUM_MICRO_BATCHES,
        "zero_optimization": {"stage": 0},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    x, y = torch.randn(4, BATCH, 8), torch.randn(4, BATCH, 4)
    is_divided = BUG in ("accumulation_unset", "divided_twice")
    with harness.training(engine.module):
        for inputs, targets in zip(x, y, strict=True):
            loss = nn.functional.mse_loss(engine(inputs[rank::size]), targets[rank::size])
            engine.backward(loss / NUM_MICRO_BATCHES if is_divided else loss)
            engine.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
